"""An exported model elsewhere: the tokenizer that it was trained with, generation that ends, and padded batches."""

import json
from pathlib import Path

import pytest
import torch
from test_tokenizer import CHAT, trained

from gossamer.data.tokenizer import load_tokenizer
from gossamer.models.export import export
from gossamer.models.llama import build_model
from gossamer.models.sizes import ModelConfig

PROMPTS = ["a", "words and wor", "Ā \x01"]


@pytest.mark.parametrize("words", ["bytes", "bpe", "both ends"])
def test_an_export_tokenizes_a_prompt_as_training_did_and_generates_alike_in_a_padded_batch(
    words: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    template = "<|bos|> $A <|im_end|>" if words == "both ends" else "<|bos|> $A"
    name = words if words == "bytes" else trained(tmp_path / "words", CHAT, template)
    tokenizer = load_tokenizer(name)
    model = build_model(ModelConfig(size="0.2m"), tokenizer.vocab_size, 32, 3)
    export(model, tmp_path, tokenizer)
    theirs, opened = AutoTokenizer.from_pretrained(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)

    assert (theirs.eos_token_id, theirs.pad_token_id) == (tokenizer.end, tokenizer.pad)
    assert theirs.bos_token_id == (tokenizer.before[0] if tokenizer.before else None)
    assert (opened.generation_config.eos_token_id, opened.generation_config.pad_token_id) == (
        tokenizer.end,
        tokenizer.pad,
    )
    assert (opened.config.eos_token_id, opened.config.pad_token_id) == (tokenizer.end, None)
    after = tokenizer.after if words == "both ends" else ()
    for text, (ids,) in [(text, tokenizer.encode([text])) for text in PROMPTS]:
        assert theirs(text)["input_ids"] == [*tokenizer.before, *ids.tolist(), *after]
        assert theirs.decode(ids.tolist()) == text

    batch = theirs(PROMPTS, padding=True, return_tensors="pt")
    assert batch["attention_mask"][0].sum() < batch["attention_mask"][1].sum()
    together = opened.generate(**batch, max_new_tokens=6, do_sample=False)
    for prompt, tokens in zip(PROMPTS, together, strict=True):
        alone = opened.generate(**theirs(prompt, return_tensors="pt"), max_new_tokens=6, do_sample=False)
        new = alone[0][len(theirs(prompt)["input_ids"]) :].tolist()
        assert tokens[batch["input_ids"].shape[1] :][: len(new)].tolist() == new


def test_generation_of_an_export_stops_at_the_token_that_ended_documents(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = build_model(ModelConfig(size="0.2m"), 256, 32, 3)
    end = int(model(torch.tensor([[97]]))[0, -1].argmax())
    export(model, tmp_path, load_tokenizer("bytes")._replace(after=(end,)))
    theirs, opened = AutoTokenizer.from_pretrained(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)
    done = opened.generate(**theirs("a", return_tensors="pt"), max_new_tokens=6, do_sample=False)
    assert done[0].tolist() == [97, end]


def test_an_export_without_an_end_names_none(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(trained(tmp_path / "words", ("[A]",), "[A] $A"))
    export(build_model(ModelConfig(size="0.2m"), tokenizer.vocab_size, 32, 3), tmp_path, tokenizer)
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"bos_token_id": tokenizer.before[0]}
