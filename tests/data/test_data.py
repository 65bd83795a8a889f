"""Training data: pure batches, one split for all formats, disjoint shards, streams that resume, clear errors."""

import itertools
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from gossamer.data import streams, token_files
from gossamer.data.bins import TokenArray
from gossamer.data.corpus import open_corpus
from gossamer.data.settings import DataConfig
from gossamer.data.streams import StreamCorpus
from gossamer.data.token_files import PIECE_CHARS, FileCorpus, _seal
from gossamer.data.tokenizer import load_tokenizer
from gossamer.errors import ConfigError, DataError

WORDS = ["the", "model", "hears", "its", "neighbours", "and", "forgets", "what", "it", "told", "über", "Nacht", "中文"]


def documents(count: int = 60, words: int = 120) -> list[str]:
    """Texts that are all different, so that a window can be traced back."""
    rng = np.random.default_rng(5)
    return [f"{number}: " + " ".join(rng.choice(WORDS, words)) + "\n" for number in range(count)]


def joined(tokens: TokenArray) -> NDArray[Any]:
    """All tokens as one array."""
    return np.concatenate([np.empty(0, np.uint8), *tokens.parts])


def write_txt(folder: Path, texts: Sequence[str]) -> Path:
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number:03}.txt").write_bytes(text.encode())
    return folder


def write_jsonl(path: Path, texts: Sequence[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": k, field: text}) + "\n" for k, text in enumerate(texts)))
    return path


def write_parquet(path: Path, texts: Sequence[str], field: str = "text") -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"id": list(range(len(texts))), field: list(texts)}), path, row_group_size=7)
    return path


def write_tokenizer(path: Path, texts: Sequence[str], end: bool = True) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>"] if end else []
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    library.train_from_iterator(texts, trainer)
    library.enable_truncation(5)  # as files from elsewhere may ask for; text must not be cut
    library.save(str(path))
    return path


def config(source: Path | str | tuple[str, ...], **options) -> DataConfig:
    source = source if isinstance(source, tuple) else str(source)
    return DataConfig(**{"source": source, "seq_len": 16, "batch_size": 4, "val_fraction": 0.2, **options})


def corpus(source: Path | str | tuple[str, ...], workers: int = 3, seed: int = 0, **options) -> FileCorpus:
    opened = open_corpus(config(source, **options), workers, seed)
    assert isinstance(opened, FileCorpus)
    return opened


def drawn(opened: FileCorpus | StreamCorpus, steps: int = 5, workers: int = 3) -> list[Tensor]:
    return [opened.batch(worker, step) for step in range(steps) for worker in range(workers)]


def same(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# Files


def test_the_standard_library_is_there_as_bytes_and_is_python() -> None:
    opened = open_corpus(DataConfig(), workers=2, seed=0)
    batch = opened.batch(0, 0)
    assert batch.shape == (8, 129) and batch.dtype is torch.int64
    assert opened.vocab_size == 256
    assert isinstance(opened, FileCorpus) and len(opened._train) > 5_000_000
    text = "".join(opened.tokenizer.decode(row.tolist()) for k in range(20) for row in opened.batch(1, k))
    assert "self." in text and "import " in text


def test_a_batch_is_a_function_of_seed_worker_and_step(tmp_path: Path) -> None:
    source = write_txt(tmp_path / "texts", documents())
    opened, again = corpus(source), corpus(source)
    backwards = [again.batch(worker, step) for step in reversed(range(5)) for worker in reversed(range(3))]
    assert same(drawn(opened), backwards[::-1])
    different = [opened.batch(0, 0), opened.batch(1, 0), opened.batch(0, 1), corpus(source, seed=1).batch(0, 0)]
    assert all(not torch.equal(a, b) for k, a in enumerate(different) for b in different[:k])


def test_threads_that_draw_at_once_get_what_one_thread_gets(tmp_path: Path) -> None:
    opened = corpus(write_txt(tmp_path / "texts", documents()))
    places = [(worker, step) for step in range(20) for worker in range(3)]
    with ThreadPoolExecutor(4) as pool:
        assert same(list(pool.map(lambda place: opened.batch(*place), places)), [opened.batch(*p) for p in places])


def test_windows_are_text_as_it_stands_in_the_documents(tmp_path: Path) -> None:
    texts = documents()
    opened = corpus(write_txt(tmp_path / "texts", texts))
    whole = b"\0".join(text.encode() for text in texts)
    inside = [bytes(row.tolist()) for batch in drawn(opened) for row in batch if 0 not in row]
    assert len(inside) > 30
    assert all(window in whole for window in inside)


def test_txt_jsonl_and_parquet_give_equal_tokens_and_one_split(tmp_path: Path) -> None:
    texts = documents()
    sources = [
        write_txt(tmp_path / "texts", texts),
        write_jsonl(tmp_path / "texts.jsonl", texts),
        write_parquet(tmp_path / "texts.parquet", texts),
    ]
    opened = [corpus(source) for source in sources]
    for other in opened[1:]:
        assert same(drawn(opened[0]), drawn(other))
        assert same(opened[0].validation(3), other.validation(3))
        other.restore(opened[0].state())


def test_a_source_may_be_a_folder_a_glob_or_a_list_and_names_each_file_once(tmp_path: Path) -> None:
    folder = write_txt(tmp_path / "texts", documents(20))
    (folder / "inner").mkdir()
    (folder / "inner" / "late.md").write_text("more words " * 50)
    (folder / "picture.png").write_bytes(b"\xff\xd8")
    expected = corpus(folder).state()
    assert corpus((str(folder / "*.txt"), str(folder / "inner"), str(folder / "000.txt"))).state() == expected
    assert corpus((str(folder / "*.txt"), str(folder / "**" / "*.md"))).state() == expected


def test_training_and_validation_text_share_nothing_and_together_are_all(tmp_path: Path) -> None:
    texts = documents(100)
    opened = corpus(write_txt(tmp_path / "texts", texts))
    train, val = (set(joined(side).tobytes().split(b"\0")) - {b""} for side in (opened._train, opened._val))
    assert not train & val
    assert train | val == {text.encode() for text in texts}
    assert 0.1 < len(val) / len(texts) < 0.3


def test_a_document_keeps_its_side_when_others_come_and_go(tmp_path: Path) -> None:
    texts = documents(100)
    held_out = {
        count: set(joined(corpus(write_txt(tmp_path / str(count), texts[:count]))._val).tobytes().split(b"\0"))
        for count in (60, 100)
    }
    kept = {text.encode() for text in texts[:60]}
    assert held_out[100] & kept == held_out[60] & kept != set()


def test_validation_is_the_same_for_every_seed_and_covers_the_held_out_text(tmp_path: Path) -> None:
    source = write_txt(tmp_path / "texts", documents())
    opened = corpus(source)
    batches = opened.validation(10)
    assert same(batches, corpus(source, workers=7, seed=9).validation(10))
    assert [batch.shape for batch in batches] == [(4, 17)] * 10
    assert np.array_equal(batches[0][0].numpy(), joined(opened._val)[:17])
    assert np.array_equal(batches[-1][-1].numpy(), joined(opened._val)[-17:])


def test_one_small_file_validates_on_its_end(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("".join(documents(8)))
    opened = corpus(path)
    whole = path.read_bytes() + b"\0"
    assert joined(opened._train).tobytes() + joined(opened._val).tobytes() == whole
    assert len(opened._val) == int(0.2 * len(whole))


def test_a_long_document_is_dealt_in_pieces_to_both_sides(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    text = "".join(documents(600, words=300))
    path.write_text(text)
    opened = corpus(path)
    assert len(text) > 10 * PIECE_CHARS
    assert 0 < len(opened._val) < 0.5 * len(opened._train)
    assert len(opened._val) + len(opened._train) == len(text.encode()) + 1


@given(workers=st.integers(1, 9), steps=st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_contiguous_shards_are_disjoint_and_iid_workers_draw_from_everything(
    workers: int, steps: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("texts")
    source = write_jsonl(folder / "texts.jsonl", documents())
    opened = corpus(source, workers=workers, shards="contiguous")
    bounds = [opened._shard(worker) for worker in range(workers)]
    assert bounds[0][0] == 0 and bounds[-1][1] == len(opened._train)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(bounds))
    for worker, (low, high) in enumerate(bounds):
        own = joined(opened._train)[low:high].tobytes()
        assert all(bytes(row.tolist()) in own for step in range(steps) for row in opened.batch(worker, step))
    everything = corpus(source, workers=workers)
    assert {everything._shard(worker) for worker in range(workers)} == {(0, len(opened._train))}


def test_each_worker_draws_from_the_source_that_shards_name_for_it_and_all_validate_on_the_same_text(
    tmp_path: Path,
) -> None:
    texts = documents()
    sources = tuple(str(write_jsonl(tmp_path / f"{k}.jsonl", texts[k::2])) for k in range(2))
    alone = [corpus(source) for source in sources]
    for cache in (None, str(tmp_path / "cache"), str(tmp_path / "cache")):  # from memory, written, and read again
        opened = corpus(sources, workers=3, shards=[1, 0, 1], cache=cache)
        for worker, source in enumerate([1, 0, 1]):
            own = joined(alone[source]._train).tobytes()
            assert joined(opened._train)[slice(*opened._shard(worker))].tobytes() == own
            assert all(bytes(row.tolist()) in own for row in opened.batch(worker, 0))
        without = corpus(sources, workers=2, shards=[0, 0], cache=cache)  # nobody trains on the second text
        assert same(opened.validation(2), without.validation(2)) and opened.state() == without.state()
        assert joined(opened._val).tobytes() == b"".join(joined(one._val).tobytes() for one in alone)


def test_a_source_that_is_too_short_for_its_worker_is_refused(tmp_path: Path) -> None:
    long, short = write_jsonl(tmp_path / "long.jsonl", documents()), tmp_path / "short.txt"
    short.write_text("a few words")
    for second in (short, long):  # of which all text is with the first source already
        with pytest.raises(DataError, match=r"training text of worker 1 is data.source"):
            corpus((str(long), str(second)), workers=2, shards=[0, 1])


def test_sources_of_few_documents_none_of_which_is_held_out_are_refused_with_what_helps(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name * 500)
    config = DataConfig(source=(str(tmp_path / "a.txt"), str(tmp_path / "b.txt")), shards=(0, 1), seq_len=16)
    with pytest.raises(DataError, match=r"0 tokens: .* give more documents, or raise data\.val_fraction"):
        FileCorpus(config, load_tokenizer("bytes"), 2, 0)


def test_text_beyond_max_bytes_is_left_out(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "texts.jsonl", documents())
    opened = corpus(source, max_bytes=5_000)
    text = (joined(opened._train).tobytes() + joined(opened._val).tobytes()).replace(b"\0", b"")
    assert 4_990 < len(text) <= 5_000  # a character that the limit cuts through is left out too


def test_a_null_text_is_an_empty_document(tmp_path: Path) -> None:
    texts = documents()
    path = write_jsonl(tmp_path / "texts.jsonl", texts)
    path.write_text('{"text": null}\n\n' + path.read_text())
    assert corpus(path).state() == corpus(write_txt(tmp_path / "texts", texts)).state()


def test_tokens_from_the_cache_are_those_from_memory_and_files_are_read_once(tmp_path: Path) -> None:
    source = write_txt(tmp_path / "texts", documents())
    cache = tmp_path / "cache"
    fresh, first = corpus(source), corpus(source, cache=str(cache))
    made = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    second = corpus(source, cache=str(cache))
    assert isinstance(second._train.parts[0], np.memmap)
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == made
    for cached in (first, second):
        assert same(drawn(fresh), drawn(cached)) and same(fresh.validation(2), cached.validation(2))
        assert cached.state() == fresh.state()
    (source / "000.txt").write_text("changed " * 99)
    assert corpus(source, cache=str(cache)).state() != fresh.state()


def test_a_copy_of_the_text_finds_the_tokens_in_the_cache(tmp_path: Path) -> None:
    source, cache = write_jsonl(tmp_path / "texts.jsonl", documents()), tmp_path / "cache"
    opened = corpus(source, cache=str(cache))
    (tmp_path / "elsewhere").mkdir()
    copied = shutil.copyfile(source, tmp_path / "elsewhere" / "other.jsonl")
    os.utime(copied, (1, 1))
    assert same(drawn(corpus(copied, cache=str(cache))), drawn(opened))
    assert len([*cache.glob("tokens-*")]) == 1
    as_one_text = shutil.copyfile(source, tmp_path / "texts.txt")  # the same bytes in another format
    assert corpus(as_one_text, cache=str(cache)).state() != opened.state()
    for known in cache.glob("text-*"):
        known.write_text("../../etc")  # what it says is not taken for a name
    assert corpus(source, cache=str(cache)).state() == opened.state()
    for known in cache.glob("text-*"):
        known.unlink()
        known.mkdir()  # nothing can be written in its place, as in a folder that may only be read
    assert corpus(source, cache=str(cache)).state() == opened.state()


def test_one_process_tokenises_for_the_cache_while_others_wait(tmp_path: Path, monkeypatch) -> None:
    source, cache = write_jsonl(tmp_path / "texts.jsonl", documents()), tmp_path / "cache"
    times, tokenise = [], token_files._tokenise

    def counted(*given: Any) -> Any:
        times.append(given)
        return tokenise(*given)

    monkeypatch.setattr(token_files, "_tokenise", counted)
    with ThreadPoolExecutor(
        4
    ) as pool:  # a lock of a file that is opened twice tells threads apart as it does processes
        opened = [*pool.map(lambda _: corpus(source, cache=str(cache)).state(), range(4))]
    assert len(times) == 1 and all(state == opened[0] for state in opened)


def test_machines_that_share_a_cache_without_locks_tokenise_apart(tmp_path: Path, monkeypatch) -> None:
    source, cache = write_jsonl(tmp_path / "texts.jsonl", documents()), tmp_path / "cache"
    write, tokenise = token_files._write_tokens, token_files._tokenise

    def with_another(*given: Any) -> None:  # a process of another machine may have this one's number
        def late(*rest: Any) -> Any:
            monkeypatch.setattr(token_files, "_tokenise", tokenise)
            write(*given)
            return tokenise(*rest)

        monkeypatch.setattr(token_files, "_tokenise", late)
        write(*given)

    monkeypatch.setattr(token_files, "_write_tokens", with_another)
    assert corpus(source, cache=str(cache)).state() == corpus(source).state()
    assert len([*cache.glob("tokens-*")]) == 1 and not [one for one in cache.glob(".tokens-*") if one.is_dir()]


def test_a_text_that_changes_while_it_is_tokenised_is_not_kept(tmp_path: Path, monkeypatch) -> None:
    source, cache = write_jsonl(tmp_path / "texts.jsonl", documents()), tmp_path / "cache"
    tokenise = token_files._tokenise
    monkeypatch.setattr(token_files, "_tokenise", lambda *given: (tokenise(*given), write_jsonl(source, ["other"]))[0])
    with pytest.raises(DataError, match="changed while it was tokenised"):
        corpus(source, cache=str(cache))
    assert not [*cache.glob("tokens-*")]


def test_a_damaged_cache_is_refused(tmp_path: Path) -> None:
    source = write_txt(tmp_path / "texts", documents())
    cache = tmp_path / "cache"
    corpus(source, cache=str(cache))
    (train,) = cache.rglob("train.bin")
    train.write_bytes(train.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"is damaged .*train.bin has"):
        corpus(source, cache=str(cache))


def test_a_cache_that_counts_to_infinity_is_refused(tmp_path: Path) -> None:
    source, cache = write_txt(tmp_path / "texts", documents()), str(tmp_path / "cache")
    corpus(source, cache=cache)
    (manifest,) = Path(cache).rglob("manifest.json")
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"ends": [math.inf]}))
    with pytest.raises(DataError, match=r"is damaged .*infinity"):
        corpus(source, cache=cache)


def test_a_cache_whose_tokens_are_not_in_the_vocabulary_is_refused(tmp_path: Path) -> None:
    texts = documents()
    source, tokenizer = write_txt(tmp_path / "texts", texts), write_tokenizer(tmp_path / "bpe.json", texts)
    options = {"cache": str(tmp_path / "cache"), "tokenizer": str(tokenizer)}
    corpus(source, **options)
    (train,) = (tmp_path / "cache").rglob("train.bin")
    train.write_bytes(b"\xff" * train.stat().st_size)
    (manifest,) = (tmp_path / "cache").rglob("manifest.json")
    sealed = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(sealed | {"files": sealed["files"] | {"train": _seal(train)}}))
    with pytest.raises(DataError, match="holds token 65535, but the vocabulary has only 300"):
        corpus(source, **options).batch(0, 0)


def test_a_checkpoint_of_other_text_is_refused(tmp_path: Path) -> None:
    state = corpus(write_txt(tmp_path / "texts", documents())).state()
    assert json.loads(json.dumps(state)) == state
    with pytest.raises(DataError, match="is another than when the checkpoint was saved"):
        corpus(write_txt(tmp_path / "others", documents(50))).restore(state)


# Tokenizers


def test_bytes_come_back_as_the_text_they_were() -> None:
    bytewise = load_tokenizer("bytes")
    text = "".join(documents(3)) + "🦋\x00"
    (ids,) = bytewise.encode([text])
    assert ids.max() < bytewise.vocab_size
    assert bytewise.decode(ids.tolist()) == text


def test_a_tokenizers_file_gives_its_own_tokens_uncut_with_an_end_after_each_document(tmp_path: Path) -> None:
    texts = documents()
    path = write_tokenizer(tmp_path / "tokenizer.json", texts)
    opened = corpus(write_txt(tmp_path / "texts", texts), tokenizer=str(path))
    assert opened.vocab_size == 300 and joined(opened._train).dtype == np.uint16
    ids = joined(opened._train + opened._val)
    assert len(ids) < 0.9 * sum(map(len, texts))
    ends = np.flatnonzero(ids == opened.tokenizer.end)
    assert len(ends) == len(texts)
    decoded = {opened.tokenizer.decode(part[:-1].tolist()) for part in np.split(ids, ends + 1)[:-1]}
    assert decoded == set(texts)
    assert load_tokenizer(str(tmp_path)).json() == opened.tokenizer.json()


def test_a_vocabulary_without_an_end_gives_documents_without_one(tmp_path: Path) -> None:
    texts = documents()
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path / "bpe.json", texts, end=False)))
    opened = corpus(write_txt(tmp_path / "texts", texts), tokenizer=str(tmp_path / "bpe.json"))
    assert tokenizer.end is None
    assert len(opened._train) + len(opened._val) == sum(len(ids) for ids in tokenizer.encode(texts))


@pytest.mark.parametrize("content", [None, "{}", "no json"])
def test_a_tokenizer_that_is_none_is_refused(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "bad.json").write_text(content)
    with pytest.raises(DataError, match="cannot be opened as a tokenizer"):
        load_tokenizer(str(tmp_path / "bad.json"))


# Streams


def streamed(folder: Path, texts: Sequence[str], kind: str, files: int) -> str:
    folder.mkdir()
    for number in range(files):
        part = texts[number::files]
        if kind == "parquet":
            write_parquet(folder / f"{number}.parquet", part)
        elif kind == "jsonl":
            write_jsonl(folder / f"{number}.jsonl", part)
        else:
            (folder / f"{number}.txt").write_text("".join(part))  # a line is a document
    return f"hf:{folder}"


def stream(source: str, workers: int, **options) -> StreamCorpus:
    opened = open_corpus(config(source, **options), workers, 0)
    assert isinstance(opened, StreamCorpus)
    return opened


def documents_of(opened: StreamCorpus, worker: int, steps: int) -> set[bytes]:
    """The whole documents in the first batches of a worker."""
    tokens = torch.cat([opened.batch(worker, step).flatten() for step in range(steps)])
    return set(bytes(tokens.tolist()).split(b"\0")[1:-1])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [{}, {"shuffle_buffer": 7}, {"prefetch": 3}, {"shuffle_buffer": 99, "prefetch": 1}])
@pytest.mark.parametrize(("kind", "files"), [("jsonl", 2), ("parquet", 3), ("txt", 2)])
def test_a_stream_resumes_with_the_batches_it_would_have_given(
    kind: str, files: int, options: dict[str, Any], tmp_path: Path
) -> None:
    source = streamed(tmp_path / "texts", documents(40, words=60), kind, files)
    whole = stream(source, 2, **options)
    steps = 150  # more than one pass over the data, and several batches from a document
    expected = [whole.batch(1, step) for step in range(steps)]
    interrupted = stream(source, 2, **options)
    for step in range(steps):
        if step % 13 == 3:
            state = json.loads(json.dumps(interrupted.state()))
            interrupted = stream(source, 2, **options)
            interrupted.restore(state)
            assert interrupted.state() == state
        assert torch.equal(interrupted.batch(1, step), expected[step])
    passed = Counter(bytes(torch.cat([batch.flatten() for batch in expected]).tolist()).split(b"\0"))
    assert max(passed.values()) >= 2


def test_a_stream_batch_is_a_function_of_worker_and_step(tmp_path: Path) -> None:
    source = streamed(tmp_path / "texts", documents(40), "jsonl", 2)
    opened = stream(source, 2)
    expected = drawn(opened, steps=6, workers=2)
    assert same([opened.batch(worker, step) for step in reversed(range(6)) for worker in (1, 0)], expected[::-1])
    assert torch.equal(stream(source, 2).batch(1, 5), expected[-1])


def passes(opened: StreamCorpus, steps: int) -> list[bytes]:
    """The documents of worker 0, in the order in which they come."""
    tokens = torch.cat([opened.batch(0, step).flatten() for step in range(steps)])
    return bytes(tokens.tolist()).split(b"\0")[:-1]


def test_a_shuffled_stream_has_each_document_once_a_pass_in_an_order_of_seed_and_pass(tmp_path: Path) -> None:
    source = streamed(tmp_path / "texts", documents(40, words=12), "jsonl", 1)
    plain, shuffled = (passes(stream(source, 1, shuffle_buffer=size), 120) for size in (None, 16))
    once = plain.index(plain[0], 1)  # so many documents has a pass
    assert sorted(plain[:once]) == sorted(shuffled[:once]) == sorted(shuffled[once : 2 * once])
    assert plain[:once] != shuffled[:once] != shuffled[once : 2 * once]
    assert sorted(plain[:16]) == sorted(shuffled[:16])  # it reads no more than a block ahead
    other = open_corpus(config(source, shuffle_buffer=16), 1, 1)
    assert passes(other, 120) != shuffled  # type: ignore[arg-type]


def test_a_stream_read_ahead_has_the_batches_and_states_of_one_that_is_not(tmp_path: Path) -> None:
    source = streamed(tmp_path / "texts", documents(40), "jsonl", 2)
    plain, ahead = stream(source, 2), stream(source, 2, prefetch=4)
    for worker, step in [(0, 0), (1, 0), (0, 1), (0, 5), (0, 2), (1, 1)]:  # on, far on, and back
        assert torch.equal(plain.batch(worker, step), ahead.batch(worker, step))
        assert plain.state() == ahead.state()


def test_a_fork_reads_on_from_the_batch_that_was_taken_last(tmp_path: Path, monkeypatch) -> None:
    source = streamed(tmp_path / "texts", documents(40), "jsonl", 1)
    opened = stream(source, 1, prefetch=2)
    opened.batch(0, 0)
    expected = stream(source, 1).batch(0, 1)
    for coming in opened._train[0]._coming:
        coming.result()
    child = os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: child)  # which finds its parent's queue, and no thread that fills it
    assert torch.equal(opened.batch(0, 1), expected)
    assert opened.state() == stream(source, 1).state() | {"streams": {"0": opened._train[0].state()}}


def test_a_stream_that_breaks_off_ahead_of_the_worker_is_reported_when_the_worker_gets_there(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "train.jsonl").write_text('{"text": "%s"}\n' % ("a" * 150) + '{"text": 7}\n')
    opened = stream(f"hf:{tmp_path / 'texts'}", 1, prefetch=3)
    first = opened.batch(0, 0)
    for _ in range(2):  # again, as a second try starts from the beginning
        with pytest.raises(DataError, match=r"of type int but must be text|broke off"):
            opened.batch(0, 3)
        assert torch.equal(opened.batch(0, 0), first)


@pytest.mark.parametrize("files", [2, 3])
def test_workers_of_a_stream_share_no_document_and_none_is_for_validation(files: int, tmp_path: Path) -> None:
    texts = documents(40)
    opened = stream(streamed(tmp_path / "texts", texts, "jsonl", files), 2)
    first, second = documents_of(opened, 0, 150), documents_of(opened, 1, 150)
    assert len(first) > 3 and len(second) > 3
    assert not first & second
    held_out = set(bytes(torch.cat([b.flatten() for b in opened.validation(60)]).tolist()).split(b"\0")[:-1])
    assert held_out and not held_out & (first | second)
    files_side = joined(corpus(write_jsonl(tmp_path / "texts.jsonl", texts))._val).tobytes().split(b"\0")
    assert held_out <= set(files_side)


def test_a_stream_takes_a_tokenizer_too(tmp_path: Path) -> None:
    texts = documents(40)
    path = write_tokenizer(tmp_path / "bpe.json", texts)
    opened = stream(streamed(tmp_path / "texts", texts, "jsonl", 2), 2, tokenizer=str(path))
    assert opened.batch(0, 0).max() >= 256 and opened.batch(0, 0).shape == (4, 17)


def test_checkpoints_of_single_workers_restore_a_whole_simulation(tmp_path: Path) -> None:
    source = streamed(tmp_path / "texts", documents(40), "jsonl", 2)
    states = []
    for worker in (0, 1):
        alone = stream(source, 2)
        alone.batch(worker, 0)
        states.append(alone.state())
    together = stream(source, 2)
    for state in states:
        together.restore(state)
    assert together.state() == {**states[0], "streams": {**states[0]["streams"], **states[1]["streams"]}}


@pytest.mark.parametrize(
    "place", [{"step": -1}, {"place": [3]}, {"used": "2"}, {"used": -1}, {"block": -1}, {"taken": 1.5}]
)
def test_a_stream_refuses_a_place_that_cannot_be(place: dict, tmp_path: Path) -> None:
    opened = stream(streamed(tmp_path / "texts", documents(10), "jsonl", 1), 1)
    with pytest.raises(DataError, match="a stream cannot be at"):
        opened.restore({"streams": {"0": {"step": 1, "place": None, "used": 0, "hash": None, **place}}})


def test_a_stream_that_has_changed_since_the_checkpoint_is_refused(tmp_path: Path) -> None:
    opened = stream(streamed(tmp_path / "texts", documents(10), "jsonl", 1), 1)
    opened.batch(0, 0)
    state = opened.state()
    other = stream(streamed(tmp_path / "others", documents(10, words=99), "jsonl", 1), 1)
    for changed, stranger in [({}, other), ({"used": 10**6}, opened)]:
        expected = stranger.batch(0, 1)
        stranger.restore({"streams": {"0": {**state["streams"]["0"], **changed}}})
        with pytest.raises(DataError, match="has changed: the document at step 1 hashed to"):
            stranger.batch(0, 1)
        assert torch.equal(stranger.batch(0, 1), expected)  # read from the start, not on from where it broke off


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ('{"body": "a", "id": 1}\n', "no field 'text'; it has: body, id"),
        ('{"text": 7}\n', "of type int but must be text"),
        ('{"text": ""}\n', "0 documents for training"),
        ('{"text": "a"}\n{"text":', "broke off"),
    ],
)
def test_a_stream_without_usable_text_is_refused(lines: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "train.jsonl").write_text(lines)
    with pytest.raises(DataError, match=sentence):
        stream(f"hf:{tmp_path / 'texts'}", 1).batch(0, 0)


class Breaking:
    """A pass over a stream that raises these faults before rows of the data set, each once, wherever it is opened."""

    def __init__(self, real: Any, faults: dict[int, list[Exception]]) -> None:
        self._real, self._faults, self._row = real, faults, 0

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._row = state["row"]
        self._real.load_state_dict(state["real"])

    def state_dict(self) -> dict[str, Any]:
        return {"row": self._row, "real": self._real.state_dict()}

    def __iter__(self) -> Iterator[Any]:
        for row in self._real:
            if faults := self._faults.get(self._row):
                raise faults.pop()
            self._row += 1
            yield row


def breaking(monkeypatch: pytest.MonkeyPatch, faults: dict[int, list[Exception]]) -> None:
    """All streams that are opened from here on raise these faults."""

    def opened(source: str, real: Callable[..., Any] = streams._open_stream) -> Callable[[int, int], Any]:
        passes = real(source)
        return lambda worker, workers: Breaking(passes(worker, workers), faults)

    monkeypatch.setattr(streams, "_open_stream", opened)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{}, {"shuffle_buffer": 7}, {"prefetch": 3}])
def test_a_stream_that_breaks_off_is_opened_again_at_its_place_with_one_warning_and_the_same_batches(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = streamed(tmp_path / "texts", documents(40), "jsonl", 2)
    whole = stream(source, 1, **options)
    expected = [whole.batch(0, step) for step in range(150)]
    hiccups = {0: [ConnectionError("reset")], 11: [TimeoutError("Read timed out."), RuntimeError("503")]}
    breaking(monkeypatch, {**hiccups, 17: [ValueError("half a line")]})
    monkeypatch.setattr(streams, "FIRST_PAUSE_S", 0.01)
    opened = open_corpus(config(source, **options), 1, 0, patience_s=20.0)
    for step, batch in enumerate(expected):
        opened.read_ahead(0, step, 2)
        assert torch.equal(opened.batch(0, step), batch)
    assert ["broke off" in one and "opened again at its place" in one for one in caplog.messages] == [True] * 3


@pytest.mark.parametrize("options", [{}, {"prefetch": 2}])
def test_what_was_read_before_a_stream_broke_off_can_be_taken_and_is_its_place(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = streamed(tmp_path / "texts", documents(40), "jsonl", 2)
    whole = stream(source, 1, **options)
    expected = [whole.batch(0, step) for step in range(60)]
    breaking(monkeypatch, {5: [ConnectionError("gone")] * 99})
    opened = open_corpus(config(source, **options), 1, 0)
    with pytest.raises(DataError, match=r"broke off \(gone\)"):
        opened.read_ahead(0, 0, 60)
    taken = 20  # which are of the documents before
    assert all(torch.equal(opened.batch(0, step), expected[step]) for step in range(taken))
    with pytest.raises(DataError, match=r"broke off \(gone\)"):
        opened.read_ahead(0, taken, 60)
    state = json.loads(json.dumps(opened.state()))
    monkeypatch.undo()
    resumed = stream(source, 1, **options)
    state["streams"]["0"]["place"] = state["streams"]["0"]["place"]["real"]
    resumed.restore(state)
    assert all(torch.equal(resumed.batch(0, step), expected[step]) for step in range(taken, 60))


def test_a_stream_that_is_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="cannot be opened as a data set"):
        stream(f"hf:{tmp_path / 'empty'}", 1)


# Errors


def test_missing_files_are_named(tmp_path: Path) -> None:
    for source in (tmp_path / "none.txt", tmp_path / "*.jsonl", tmp_path):
        with pytest.raises(DataError, match="names no readable file") as caught:
            corpus(source)
        assert str(source) in str(caught.value)


def test_a_file_of_a_kind_that_is_not_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("a,b")
    with pytest.raises(DataError, match=r"ends in '.csv' but files must end in one of: .txt, .*.parquet"):
        corpus(tmp_path / "table.csv")


def test_a_file_that_is_not_utf8_is_named_with_the_place(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("naïf".encode("latin-1"))
    with pytest.raises(DataError, match=r"latin.txt' has byte 0xef at offset 2"):
        corpus(tmp_path / "latin.txt")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"text": "a"', "line 2 of '.*bad.jsonl' is not JSON"),
        ("[" * 100_000, "line 2 of '.*bad.jsonl' is not JSON"),
        ("\xff", "line 2 of '.*bad.jsonl' is not JSON"),
        ("[1]", "line 2 of '.*' is list but must be a JSON object"),
        ('{"body": "a", "id": 3}', "line 2 of '.*' has no field 'text'; it has: body, id"),
        ("{}", "has no field 'text'; it has: none"),
        ('{"text": [1], "body": "b"}', "field 'text' in line 2 .* is of type list .* of: body"),
        ('{"text": "\\ud800"}', "line 2 .* has the lone surrogate '.ud800' at character 0"),
    ],
)
def test_a_bad_line_of_jsonl_is_named(line: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "fine"}\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(DataError, match=sentence):
        corpus(tmp_path / "bad.jsonl")


def test_a_parquet_file_without_the_column_or_broken_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"no field 'text'; it has: id, body; set data.text_field to one that is text, of: body$"
    ):
        corpus(write_parquet(tmp_path / "body.parquet", documents(5), field="body"))
    assert corpus(tmp_path / "body.parquet", text_field="body").vocab_size == 256
    with pytest.raises(DataError, match=r"field 'id' in row 0 .* is of type int"):
        corpus(tmp_path / "body.parquet", text_field="id")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        corpus(tmp_path / "broken.parquet")


def test_too_little_text_is_refused_with_what_it_needs(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("")
    with pytest.raises(DataError, match="has 0 bytes"):
        corpus(path)
    path.write_text("too short")
    with pytest.raises(DataError, match=r"training text has 8 tokens, but one window needs data.seq_len \+ 1 = 17"):
        corpus(path)
    path.write_text("just enough to train on, but little to validate")
    with pytest.raises(DataError, match="validation text has 9 tokens"):
        corpus(path)
    path.write_text("some text " * 12)
    assert corpus(path, workers=6).vocab_size == 256
    with pytest.raises(DataError, match="training text of one worker has 16 tokens"):
        corpus(path, workers=6, shards="contiguous")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"seq_len": 0}, "data.seq_len is 0"),
        ({"batch_size": 0}, "data.batch_size is 0"),
        ({"accumulate": 0}, "data.accumulate is 0"),
        ({"max_bytes": 0}, "data.max_bytes is 0"),
        ({"val_fraction": 0.0}, "data.val_fraction is 0.0"),
        ({"val_fraction": 1.0}, "data.val_fraction is 1.0"),
        ({"shards": "continuous"}, "did you mean 'contiguous'"),
        ({"source": ""}, "data.source is ''"),
        ({"source": ()}, "data.source is an empty list"),
        ({"tokenizer": ""}, "data.tokenizer is ''"),
        ({"shuffle_buffer": 9}, "only a stream"),
        ({"prefetch": 2}, "only a stream"),
        ({"source": ("hf:a", "b")}, "must be the only source"),
        ({"source": "hf:a", "max_bytes": 9}, "data.max_bytes is 9, which works for files only"),
        ({"source": "hf:a", "cache": "c"}, "data.cache is 'c', which works for files only"),
        ({"source": "hf:a", "shards": "contiguous"}, "a stream divides its documents"),
        ({"source": "hf:a", "shards": (0, 0)}, "a stream divides its documents"),
        ({"source": "my.data:batch", "shards": "contiguous"}, "a function divides its data"),
        ({"source": ("a", "b"), "shards": (0, 2)}, r"data.shards is \[0, 2\], but the last place of data.source is 1"),
        ({"source": "a", "shards": (-1,)}, "data.shards"),
        ({"source": "a", "shards": ()}, "data.shards is an empty list"),
    ],
)
def test_impossible_settings_are_refused_with_a_sentence(options: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        DataConfig(**options)


def test_the_fingerprint_tells_two_splits_of_one_text_apart(tmp_path: Path) -> None:
    source = str(write_txt(tmp_path / "texts", documents()))
    few, many = (open_corpus(DataConfig(source=source, val_fraction=share), 1, 0) for share in (0.1, 0.5))
    assert few.state() != many.state()
    assert few.state() == open_corpus(DataConfig(source=source, val_fraction=0.1), 1, 0).state()
