"""Special tokens: those of the tokenizer stand around each document in training, however they are named."""

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


def unigram(folder: Path) -> str:
    """A tokenizer whose special tokens are words of its model, as those of T5 are."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    words = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0), *((chr(k), -5.0) for k in range(33, 127))]
    library = Tokenizer(models.Unigram(words, unk_id=2))
    library.pre_tokenizer, library.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    library.add_special_tokens(["<pad>", "</s>", "<unk>"])
    library.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    folder.mkdir(parents=True)
    library.save(str(folder / "tokenizer.json"))
    return str(folder)


def by_merges(folder: Path) -> str:
    """A tokenizer whose special token is a word of its model that merges make, or that is taken whole."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = {word: id for id, word in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "</", "s>", "</s>"])}
    library = Tokenizer(models.BPE(words, [("<", "/"), ("s", ">"), ("</", "s>")], ignore_merges=True))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["</s>"])
    folder.mkdir(parents=True)
    library.save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.mark.parametrize("make", [trained, unigram, by_merges])
def test_text_that_spells_a_special_token_is_read_as_text_in_files_and_streams(make: Any, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    name = make(tmp_path / "words")
    words = load_tokenizer(name)
    special = {Tokenizer.from_file(f"{name}/tokenizer.json").token_to_id(token) for token in words.special}
    texts = [
        text for token in sorted(words.special) for text in (token, f"a {token} b", f"{token}{token}", f"x{token}y")
    ]
    for text, ids in zip(texts, words.encode(texts), strict=True):
        assert words.decode(ids.tolist()) == text and not special & {*ids.tolist()}, (text, ids)
    assert (
        len(words.special) == len(special) > 0 and words.after and special >= {*words.before, *words.after, words.pad}
    )
    assert words.json() == Tokenizer.from_file(f"{name}/tokenizer.json").to_str(), "what is exported is what was given"

    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts * 9))
    options: dict[str, Any] = {"tokenizer": name, "seq_len": 8, "batch_size": 2, "val_fraction": 0.2}
    files = open_corpus(DataConfig(source=str(tmp_path / "texts"), **options), 1, 0)
    assert isinstance(files, FileCorpus)
    assert np.count_nonzero(joined(files._train + files._val) == words.end) == 9 * len(texts), (
        "one end for each document"
    )
    stream = open_corpus(DataConfig(source=f"hf:{tmp_path / 'texts'}", **options), 1, 0)
    ids = [int(token) for step in range(8) for token in stream.batch(0, step).flatten()]
    shown = words.decode([id for id in ids if id not in special])
    assert {"</s>", "<|im_end|>"} & words.special <= {token for token in words.special if token in shown}


def test_a_run_that_was_begun_with_another_reading_of_special_tokens_is_refused(tmp_path: Path) -> None:
    name, source = trained(tmp_path / "words"), tmp_path / "texts"
    source.mkdir()
    (source / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    options: dict[str, Any] = {"tokenizer": name, "seq_len": 8, "batch_size": 2}
    files = open_corpus(DataConfig(source=str(source), **options), 1, 0)
    with pytest.raises(DataError, match="spell special tokens of its tokenizer, with the version of Gossamer"):
        files.restore({"fingerprint": "0" * 32})
    stream = open_corpus(DataConfig(source=f"hf:{source}", **options), 1, 0)
    stream.batch(0, 0)
    state = {**stream.state()}
    stream.restore(state)
    del state["reading"]
    with pytest.raises(DataError, match="took text which spells a special token for that token"):
        stream.restore(state)
    bytewise = open_corpus(DataConfig(**{**options, "tokenizer": "bytes"}, source=f"hf:{source}"), 1, 0)
    bytewise.restore({"streams": {"0": {"step": 0, "place": None, "used": 0, "hash": None}}})


def test_a_tokenizer_that_lacks_its_unknown_token_is_refused_in_a_sentence(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    words = load_tokenizer(str(tmp_path))
    assert words.encode(["a"])[0].tolist() == [0]
    with pytest.raises(DataError, match=r"the tokenizer '.*' cannot encode a text \(.*\); repair its file"):
        words.encode(["x"])
    Tokenizer(models.WordLevel({"b": 1}, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match="cannot encode a text"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_with_an_id_that_no_vocabulary_has_is_refused_before_memory_is_taken_for_all_below_it(
    tmp_path: Path,
) -> None:
    from tokenizers import Tokenizer, models

    made = json.loads(Tokenizer(models.WordLevel({"a": 0, "cat": 1}, unk_token="a")).to_str())
    made["model"]["vocab"]["cat"] = 1 << 31
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    with pytest.raises(DataError, match="gives a token the id 2,147,483,648, and ids are below 16,777,216"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))


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
