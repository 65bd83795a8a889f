"""Special tokens: those of the tokenizer stand around each document in training, whoever names them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_data import joined

from gossamer.data.corpus import open_corpus
from gossamer.data.settings import DataConfig
from gossamer.data.token_files import PIECE_CHARS, FileCorpus
from gossamer.data.tokenizer import load_tokenizer
from gossamer.errors import DataError

TEXTS = [f"{number} words and words again {number}\n" for number in range(40)]
CHAT = ("<|bos|>", "<|im_end|>", "<|pad|>")


def trained(folder: Path, special: tuple[str, ...] = CHAT, template: str | None = "<|bos|> $A", **named: Any) -> str:
    """A tokenizer file with these special tokens, a post-processor, and a tokenizer_config.json if it names any."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=280,
            special_tokens=[*special],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    if template is not None:
        ids = [(token, library.token_to_id(token)) for token in template.split() if token in special]
        library.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    folder.mkdir(parents=True, exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    if named:
        (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return str(folder)


@pytest.mark.parametrize(
    ("special", "template", "named", "before", "after", "pad"),
    [
        (CHAT, "<|bos|> $A", {}, ["<|bos|>"], ["<|im_end|>"], "<|pad|>"),
        (CHAT, None, {}, [], ["<|im_end|>"], "<|pad|>"),
        (("<s>", "</s>"), "<s> $A </s>", {}, ["<s>"], ["</s>"], "</s>"),
        (("<|end|>", "<|stop|>"), None, {"eos_token": "<|stop|>"}, [], ["<|stop|>"], "<|stop|>"),
        (("<|stop|>",), None, {"eos_token": {"content": "<|stop|>", "special": True}}, [], ["<|stop|>"], "<|stop|>"),
        (("</s>", "<x>"), None, {"eos_token": "<none>", "pad_token": "<x>"}, [], ["</s>"], "<x>"),
        (("[A]", "[B]"), "[A] [B] $A", {}, ["[A]", "[B]"], [], None),
    ],
)
def test_a_document_stands_between_the_special_tokens_of_its_tokenizer(
    special: tuple[str, ...], template: str, named: dict, before: list, after: list, pad: str | None, tmp_path: Path
) -> None:
    words = load_tokenizer(trained(tmp_path, special, template, **named))
    assert [*map(words.token, words.before)] == before and [*map(words.token, words.after)] == after
    assert pad == (None if words.pad is None else words.token(words.pad))
    assert words.end == (words.after[-1] if after else None)


def test_documents_of_files_and_streams_have_the_tokens_around_them_also_when_they_are_cut(tmp_path: Path) -> None:
    name, long = trained(tmp_path / "words"), "a b " * PIECE_CHARS
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in [*TEXTS, long]))
    options: dict[str, Any] = {"tokenizer": name, "seq_len": 8, "batch_size": 2}
    opened = open_corpus(DataConfig(source=str(tmp_path / "texts"), **options), 1, 0)
    assert isinstance(opened, FileCorpus)
    ids, words = joined(opened._train + opened._val), opened.tokenizer
    assert np.count_nonzero(ids == words.before[0]) == np.count_nonzero(ids == words.end) == len(TEXTS) + 1
    stream = open_corpus(DataConfig(source=f"hf:{tmp_path / 'texts'}", **options), 1, 0)
    shown = words.decode([int(token) for step in range(8) for token in stream.batch(0, step).flatten()])
    assert all(part.endswith("<|im_end|>") for part in shown.split("<|bos|>")[1:-1])


def test_a_tokenizer_config_that_is_no_object_is_refused(tmp_path: Path) -> None:
    name = trained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(DataError, match=r"tokenizer_config.json' is no JSON object"):
        load_tokenizer(name)


def test_a_tokenizer_on_the_hub_has_the_special_tokens_that_its_repository_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from tokenizers import Tokenizer

    path = trained(tmp_path, ("<|end|>", "<|stop|>"), None, eos_token="<|stop|>")

    def from_pretrained(name: str) -> Tokenizer:
        return Tokenizer.from_file(f"{path}/tokenizer.json")

    def download(name: str, file: str) -> str:
        return f"{path}/{file}"

    monkeypatch.setattr("tokenizers.Tokenizer.from_pretrained", from_pretrained, raising=False)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    words = load_tokenizer("some/tokenizer")
    assert words.end is not None and words.token(words.end) == "<|stop|>"
