"""Files of tokens that others have made: their kinds, their validation, what is wrong with them, and runs on them."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tomli_w
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import gossamer
from commands import run
from gossamer.data.bins import TokenArray, is_for_validation, open_binary
from gossamer.data.settings import DataConfig
from gossamer.data.token_files import FileCorpus
from gossamer.data.tokenizer import load_tokenizer
from gossamer.errors import DataError
from tiny import document

BYTES = load_tokenizer("bytes")
LARGE = BYTES._replace(vocab_size=70_000)


def tokens(count: int = 5_000, below: int = 256, seed: int = 0) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(1, below, count)


def plain(path: Path, ids: NDArray[np.int64], dtype: str = "<u2") -> None:
    """As nanoGPT writes them."""
    ids.astype(dtype).tofile(path)


def with_header(path: Path, ids: NDArray[np.int64], magic: int = 20240520, dtype: str = "<u2") -> None:
    """As llm.c and modded-nanogpt write them."""
    header = np.zeros(256, "<i4")
    header[:3] = magic, 1, len(ids)
    path.write_bytes(header.tobytes() + ids.astype(dtype).tobytes())


def megatron(path: Path, ids: NDArray[np.int64], code: int = 8, dtype: str = "<u2") -> None:
    """As the indexed data set of Megatron writes them: three documents of one sequence each."""
    lengths = np.array([len(ids) // 2, len(ids) // 4, len(ids) - len(ids) // 2 - len(ids) // 4])
    starts = np.concatenate([[0], lengths.cumsum()[:-1]]) * np.dtype(dtype).itemsize
    head = b"MMIDIDX\x00\x00" + np.array([1], "<u8").tobytes() + bytes([code]) + np.array([3, 4], "<u8").tobytes()
    body = lengths.astype("<i4").tobytes() + starts.astype("<i8").tobytes() + np.arange(4).astype("<i8").tobytes()
    path.with_suffix(".idx").write_bytes(head + body)
    ids.astype(dtype).tofile(path)


KINDS: dict[str, tuple[Callable[[Path, NDArray[np.int64]], object], int]] = {
    "nanoGPT": (plain, 256),
    "nanoGPT, 32 bits for a large vocabulary": (lambda path, ids: plain(path, ids, "<u4"), 70_000),
    "nanoGPT, 32 bits for a small one": (lambda path, ids: plain(path, ids, "<u4"), 256),
    "llm.c for GPT-2": (with_header, 256),
    "llm.c for Llama 3": (lambda path, ids: with_header(path, ids, 20240801, "<u4"), 70_000),
    "Megatron, 16 bits": (megatron, 256),
    "Megatron, 32 bits": (lambda path, ids: megatron(path, ids, 4, "<i4"), 70_000),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_each_kind_is_read_to_the_token(kind: str, tmp_path: Path):
    write, vocab_size = KINDS[kind]
    write(tmp_path / "text.bin", ids := tokens(below=vocab_size))
    found = open_binary(tmp_path / "text.bin", vocab_size)
    assert np.array_equal(found.tokens, ids) and isinstance(found.tokens, np.memmap)
    assert found.documents == (3 if "Megatron" in kind else None)


@given(st.lists(st.integers(0, 9), max_size=6), st.data())
def test_a_window_lies_across_arrays_as_in_one(lengths: list[int], data: st.DataObject):
    parts = [tokens(length, seed=k) for k, length in enumerate(lengths)]
    whole, joined = np.concatenate([np.empty(0, np.int64), *parts]), TokenArray(parts)
    at, stop = sorted(data.draw(st.integers(0, len(whole))) for _ in range(2))
    assert len(joined) == len(whole)
    if stop > at:
        assert np.array_equal(joined.window(at, stop - at), whole[at:stop])
    before, after = joined.cut(at)
    assert (len(before), len(after)) == (at, len(whole) - at)
    for half, same in ((before, whole[:at]), (after, whole[at:]), (before + after, whole)):
        assert not len(same) or np.array_equal(half.window(0, len(same)), same)


def corpus(folder: Path, *sources: str, **settings: object) -> FileCorpus:
    given: dict[str, object] = {"seq_len": 16, "batch_size": 4, **settings}
    source = tuple(str(folder / one) for one in sources)
    return FileCorpus(DataConfig(source=source, **given), BYTES, 2, 0)  # pyright: ignore[reportArgumentType]


def contains(text: NDArray[np.int64], windows: torch.Tensor) -> bool:
    raw = text.astype(np.uint8).tobytes()
    return all(bytes(window.tolist()) in raw for window in windows)


def test_files_named_val_are_for_validation_and_else_the_end_of_each_source_is(tmp_path: Path):
    train, val = tokens(4_000, 128), tokens(900, 128, seed=1) + 128
    plain(tmp_path / "fineweb_train_000001.bin", train[:2_000])
    with_header(tmp_path / "fineweb_train_000002.bin", train[2_000:])
    with_header(tmp_path / "fineweb_val_000000.bin", val)
    assert is_for_validation(tmp_path / "fineweb_val_000000.bin")
    opened = corpus(tmp_path, "*.bin")
    assert contains(train, opened.batch(0, 0)) and contains(val, opened.validation(1)[0])
    assert opened.read[0].in_words() == f"text of '{tmp_path}/*.bin': 3 files, 9,800 bytes, 4,900 tokens"
    alone = corpus(tmp_path, "fineweb_train_000001.bin", "fineweb_train_000002.bin", val_fraction=0.1, shards=(0, 1))
    assert contains(train[:1_800], alone.batch(0, 3)) and contains(train[2_000:3_800], alone.batch(1, 3))
    assert contains(np.concatenate([train[1_800:2_000], train[3_800:]]), alone.validation(2)[0])


def test_a_file_that_was_replaced_is_no_longer_the_text_of_the_run(tmp_path: Path):
    plain(tmp_path / "train.bin", ids := tokens(100_000))
    before = corpus(tmp_path, "train.bin").state()
    corpus(tmp_path, "train.bin").restore(before)
    plain(tmp_path / "train.bin", np.concatenate([ids[:50_000], ids[:1], ids[50_001:]]))
    with pytest.raises(DataError, match="is another than when the checkpoint was saved"):
        corpus(tmp_path, "train.bin").restore(before)


def cut(path: Path, by: int = 1) -> None:
    path.write_bytes(path.read_bytes()[:-by])


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "half a token": (lambda path: (plain(path, tokens()), cut(path))[-1], "no whole tokens of 2 bytes"),
    "a cut file with a header": (
        lambda path: (with_header(path, tokens()), cut(path, 2))[-1],
        "says 5,000 tokens .* 9,998",
    ),
    "a cut file of Megatron": (
        lambda path: (megatron(path, tokens()), cut(path, 2))[-1],
        "3 sequences have 5,000 tokens",
    ),
    "a cut index": (
        lambda path: (megatron(path, tokens()), cut(path.with_suffix(".idx"), 60))[-1],
        "names 3 sequences",
    ),
    "no index": (
        lambda path: (plain(path, tokens()), path.with_suffix(".idx").write_text("x"))[0],
        "does not begin like one",
    ),
    "an index of floats": (lambda path: megatron(path, tokens(), 6, "<f8"), "version 1 and kind 6"),
    "another vocabulary": (
        lambda path: plain(path, tokens(below=50_000)),
        r"has token \d+, but the vocabulary .* has 256",
    ),
    "negative tokens": (lambda path: megatron(path, -tokens(), 4, "<i4"), r"has token -\d+"),
    "a huge count": (
        lambda path: path.write_bytes(np.array([20240520, 1, 2**31 - 1] + [0] * 253, "<i4").tobytes()) and None,
        "says 2,147,483,647 tokens",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_fault_of_a_file_is_reported_before_a_run_begins(name: str, tmp_path: Path):
    write, sentence = WRONG[name]
    write(tmp_path / "train.bin")
    with pytest.raises(DataError, match=sentence):
        corpus(tmp_path, "train.bin")
    file = tmp_path / "run.toml"
    file.write_text(tomli_w.dumps(document(data__source=str(tmp_path / "train.bin"))))
    code, output = run("check", file)
    assert (
        code == 0
        and "but not on this machine" in output
        and str(tmp_path / "train.") in output
        and "Traceback" not in output
    )


@pytest.mark.parametrize(("key", "value"), [("max_bytes", 100), ("cache", "cache")])
def test_an_option_of_text_is_refused_for_tokens(key: str, value: object, tmp_path: Path):
    plain(tmp_path / "train.bin", tokens())
    with pytest.raises(DataError, match=f"remove data.{key}"):
        corpus(tmp_path, "train.bin", **{key: value})


def test_text_and_tokens_are_not_mixed_and_a_folder_is_not_searched_for_tokens(tmp_path: Path):
    plain(tmp_path / "train.bin", tokens())
    with pytest.raises(DataError, match=r"no readable file; left out: 1 \.bin; .*named one by one or as"):
        corpus(tmp_path, "")
    (tmp_path / "a.txt").write_text("text " * 400)
    assert corpus(tmp_path, "").read[0].left_out == {".bin": 1}
    with pytest.raises(DataError, match=r"names text, .* and tokens"):
        corpus(tmp_path, "a.txt", "train.bin")


@pytest.mark.full
def test_a_run_on_tokens_has_the_losses_of_a_run_on_their_text(tmp_path: Path):
    ids = np.frombuffer(("a text that comes again and again, " * 300).encode(), np.uint8).astype(np.int64)
    for kind in ("nanoGPT", "llm.c for GPT-2", "Megatron, 16 bits"):
        (tmp_path / kind).mkdir()
        KINDS[kind][0](tmp_path / kind / "train.bin", ids)
        settings = document(data__source=str(tmp_path / kind / "train.bin"), run__steps=2, record__export=True)
        assert gossamer.simulate(settings, tmp_path / kind / "run").over
    assert len({losses(tmp_path / kind / "run") for kind in ("nanoGPT", "llm.c for GPT-2", "Megatron, 16 bits")}) == 1
    code, output = run(
        "evaluate", tmp_path / "nanoGPT" / "run", "--source", tmp_path / "nanoGPT" / "train.bin", "--json"
    )
    assert code == 0 and 0 < json.loads(output.splitlines()[-1])["loss"] < 6


def losses(folder: Path) -> tuple[float, ...]:
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return tuple(line["loss"] for line in lines if line["kind"] in ("train", "eval"))


@pytest.mark.skipif(os.name == "nt", reason="Windows cuts no file that is mapped")
@pytest.mark.parametrize("cached", [False, True])
def test_a_file_that_is_cut_while_a_run_reads_it_is_named(cached: bool, tmp_path: Path):
    path = tmp_path / ("text.txt" if cached else "tokens.bin")
    plain(path, tokens(70_000)) if not cached else path.write_text("a word " * 20_000)
    cache = str(tmp_path / "cache") if cached else None
    corpus = FileCorpus(DataConfig(source=str(path), cache=cache, seq_len=16), BYTES, 1, 0)
    corpus.batch(0, 0)
    if cached:
        (path,) = (tmp_path / "cache").glob("tokens-*/train.bin")
    with path.open("ab") as file:
        file.write(b"more")
    corpus.batch(0, 1)  # what grows is read as it was
    os.truncate(path, 5_000)
    with pytest.raises(
        DataError, match=r"(train|tokens)\.bin' had at least .* cut to 5,000 while it was read; restore it, or"
    ):
        corpus.batch(0, 2)


def test_a_file_that_lies_beyond_its_samples_is_noticed_when_it_is_drawn(tmp_path: Path):
    ids = tokens(200_000)
    ids[60_000:65_000] = 9_999
    plain(tmp_path / "train.bin", ids)
    opened = corpus(tmp_path, "train.bin", batch_size=64)
    with pytest.raises(DataError, match="has token 9999, but the vocabulary has only 256; name the tokenizer"):
        [opened.batch(0, step) for step in range(20)]
