"""Reading files, and reporting what was read: endings, byte-order marks, data set cards, caches and fields."""

import errno
import gzip
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from test_data import documents, joined, write_jsonl, write_parquet, write_txt

from gossamer.data.corpus import open_corpus
from gossamer.data.documents import field, read_documents, source_files
from gossamer.data.settings import DataConfig
from gossamer.data.token_files import FileCorpus
from gossamer.errors import DataError

ENDINGS = ["a.TXT", "a.txt.gz", "a.JSONL", "a.jsonl.gz", "a.text", "a.Md"]


def opened(source: Path, **options: Any) -> FileCorpus:
    corpus = open_corpus(DataConfig(source=str(source), seq_len=16, batch_size=4, val_fraction=0.2, **options), 1, 0)
    assert isinstance(corpus, FileCorpus)
    return corpus


def tokens(corpus: FileCorpus) -> bytes:
    return joined(corpus._train + corpus._val).tobytes()


@pytest.mark.parametrize("name", ENDINGS)
def test_endings_in_upper_case_and_behind_gz_are_read(name: str, tmp_path: Path) -> None:
    text = "".join(documents(8))
    raw = json.dumps({"text": text}).encode() if ".jsonl" in name.lower() else text.encode()
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    assert tokens(opened(tmp_path)) == tokens(opened(tmp_path / name)) == text.encode() + b"\0"


def test_a_compressed_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(bytes(range(65, 90)) * 99)[:-9])
    with pytest.raises(DataError, match=r"a.txt.gz' cannot be read \(.*\); correct it, or leave it out"):
        opened(tmp_path)


def test_a_folder_says_how_many_files_of_which_endings_it_leaves_out_but_not_of_hidden_ones(tmp_path: Path) -> None:
    folder = write_txt(tmp_path / "texts", documents())
    for name in ("a.jsonl.zst", "b.JSONL.zst", "c.html", "d.json", "LICENSE", ".git/x.pack", "__pycache__/e.pyc"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("x")
    (read,) = opened(folder).read
    assert read.left_out == {".jsonl.zst": 2, ".html": 1, ".json": 1, "LICENSE": 1}
    assert (read.files, read.documents, read.bytes) == (60, 60, sum(len(text.encode()) for text in documents()))
    assert read.tokens == read.bytes + 60
    assert read.in_words().endswith("; left out: 1 .html, 1 .json, 2 .jsonl.zst, 1 LICENSE")


def test_copies_in_hidden_folders_are_not_read_where_a_folder_is_searched(tmp_path: Path) -> None:
    folder = write_txt(tmp_path / ".texts", documents(3))
    before = source_files([str(folder)])
    for name in (".ipynb_checkpoints/0-checkpoint.txt", ".cache/huggingface/a.md", "__pycache__/b.py", ".c.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("an older copy")
    assert source_files([str(folder)]) == before and len(before[0].files) == 3
    assert len(source_files([str(folder / ".ipynb_checkpoints")])[0].files) == 1, "as it is named"


def test_the_card_of_a_data_set_is_no_text_but_a_readme_among_texts_is(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "train.jsonl", documents())
    (tmp_path / "README.md").write_text("license: mit")
    assert b"license" not in tokens(opened(tmp_path))
    assert opened(tmp_path).read[0].left_out == {"README.md": 1}
    folder = write_txt(tmp_path / "texts", documents())
    (folder / "README.md").write_text("license: mit")
    assert b"license" in tokens(opened(folder)) and not opened(folder).read[0].left_out


@pytest.mark.parametrize("others", [["train.jsonl.zst"], ["a.zip", "b.zip"]])
def test_a_folder_of_which_only_a_readme_would_be_read_is_refused(others: list[str], tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("about the data " * 99)
    assert len(tokens(opened(tmp_path))) > 1000  # where there is nothing else, it is the text
    for name in others:
        (tmp_path / name).write_text("x")
    with pytest.raises(DataError, match=r"has only README.md to read; left out: \d .*convert those"):
        opened(tmp_path)


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    text, mark = "".join(documents(8)), b"\xef\xbb\xbf"
    for name in ("a.txt", "a.md", "a.py"):
        (tmp_path / name).write_bytes(mark + text.encode())
        assert tokens(opened(tmp_path / name)) == text.encode() + b"\0"
    (tmp_path / "a.jsonl").write_bytes(mark + json.dumps({"text": "\ufeff" + text}).encode() + b"\n")
    write_parquet(tmp_path / "a.parquet", ["\ufeff" + text])
    for name in ("a.jsonl", "a.parquet"):
        assert tokens(opened(tmp_path / name)) == text.encode() + b"\0"


def test_a_file_in_utf_16_is_refused_as_such(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("text".encode("utf-16"))
    with pytest.raises(DataError, match="not UTF-8, as it begins like UTF-16; convert the file"):
        opened(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("row", "name", "found"),
    [
        ({"a": {"b": "text"}}, "a.b", "text"),
        ({"a": None}, "a.b", ""),
        ({"a": {"b": None}}, "a.b", ""),
        ({"a.b": "whole", "a": {"b": "part"}}, "a.b", "whole"),
    ],
)
def test_a_dotted_field_is_that_of_an_object(row: Mapping[str, Any], name: str, found: str) -> None:
    assert field(row, name, "row 0") == found


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"text": ["a"]}, "is of type list but must be text; none of its fields is text: write it as text"),
        ({"text": ["a"], "n": 1}, "none of its fields is text"),
        ({"text": ["a"], "body": "b", "n": 1}, "set data.text_field to one that is text, of: body"),
        ({"meta": {"title": "t", "body": "b"}, "tags": []}, "has no field 'text'; .*, of: meta.title, meta.body"),
        ({"tags": []}, "it has: tags; none of its fields is text"),
    ],
)
def test_no_field_is_recommended_that_is_no_text(row: Mapping[str, Any], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        field(row, "text", "row 0")


def test_parquet_whose_text_is_no_utf_8_is_refused_by_name(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", ["the cat", "sat"])
    path.write_bytes(path.read_bytes().replace(b"sat", b"\x80at"))
    with pytest.raises(DataError, match=r"a\.parquet' cannot be read as parquet \('utf-8' codec"):
        opened(path)


def test_parquet_with_text_in_objects_and_nulls_is_read_and_lists_are_not_recommended(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = documents()
    rows = [{"meta": {"body": text}, "tags": ["a"]} for text in texts] + [{"meta": None, "tags": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    as_text = write_txt(tmp_path / "texts", texts)
    assert opened(tmp_path / "a.parquet", text_field="meta.body").state() == opened(as_text).state()
    with pytest.raises(DataError, match=r"it has: meta, tags; set data.text_field to one that is text, of: meta.body$"):
        opened(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"has no field 'meta.text'.*of: meta.body"):
        opened(tmp_path / "a.parquet", text_field="meta.text")


def test_a_cache_that_was_altered_in_place_is_refused_and_a_copy_of_a_sound_one_is_not(tmp_path: Path) -> None:
    source, cache = write_txt(tmp_path / "texts", documents()), tmp_path / "cache"
    state = opened(source, cache=str(cache)).state()
    for path in cache.rglob("*.bin"):
        os.utime(path, (1, 1))
    assert opened(source, cache=str(cache)).state() == state
    (train,) = cache.rglob("train.bin")
    with train.open("r+b") as file:
        file.write(b"#")
    with pytest.raises(
        DataError, match=r"is damaged \(.*train.bin was altered after it was written.*; remove that folder"
    ):
        opened(source, cache=str(cache))


def test_a_cache_that_cannot_be_written_is_not_blamed_on_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_txt(tmp_path / "texts", documents())
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"^data.cache is '.*file', which cannot be written \(.*\); make room"):
        opened(source, cache=str(tmp_path / "file"))

    def full(file: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("gossamer.data.token_files._seal", full)
    with pytest.raises(DataError, match=r"^data.cache is '.*full', which cannot be written \(.*No space left"):
        opened(source, cache=str(tmp_path / "full"))
    assert not [one for one in (tmp_path / "full").iterdir() if one.is_dir()]  # what was begun is gone


def test_a_file_that_vanishes_is_not_blamed_on_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_txt(tmp_path / "texts", documents())

    def gone(path: Path) -> Any:
        raise FileNotFoundError(errno.ENOENT, "No such file", str(path))

    monkeypatch.setattr("gossamer.data.documents._bytes_of", gone)
    for options in ({}, {"cache": str(tmp_path / "cache")}):
        with pytest.raises(DataError, match=r"000.txt' cannot be read"):
            opened(source, **options)


def test_a_file_of_two_sources_belongs_to_the_first(tmp_path: Path) -> None:
    folder = write_txt(tmp_path / "texts", documents())
    first, second = source_files([str(folder / "000.txt"), str(folder)])
    assert len(first.files) == 1 and len(second.files) == 59


def test_all_of_a_scored_text_is_for_validation_however_short_it_is(tmp_path: Path) -> None:
    (path := tmp_path / "a.txt").write_text("abc")
    for text, window in (("abc", 4), ("".join(documents()), 17)):
        path.write_text(text)
        corpus = open_corpus(DataConfig(source=str(path), seq_len=16, batch_size=4), 2, 0, scored=True)
        assert isinstance(corpus, FileCorpus)
        batches = corpus.validation(corpus.batches_of_all(1 << 20))
        assert {batch.shape for batch in batches} == {(4, window)}
        predicted = b"".join(bytes(row[1:].tolist()) for batch in batches for row in batch)
        assert {*text.encode()[1:]} <= {*predicted} and len(predicted) >= len(text.encode())
    path.write_text("")
    with pytest.raises(DataError, match=r"has 0 tokens, but at least 2 can be scored"):
        open_corpus(DataConfig(source=str(path)), 1, 0, scored=True)


def test_a_line_or_an_unpacked_text_without_an_end_is_refused_before_it_fills_memory(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("gossamer.data.documents.MOST_BYTES", 1000)
    (tmp_path / "fits.jsonl").write_text(json.dumps({"text": "a" * 987}) + "\n" + json.dumps({"text": "b"}))
    assert [len(one.text) for one in read_documents(tmp_path / "fits.jsonl", "text")] == [987, 1]
    (tmp_path / "long.jsonl.gz").write_bytes(gzip.compress(b'{"text": "b"}\n' + b"a" * 2000))
    with pytest.raises(DataError, match=r"line 2 of .* has more than 1,000 bytes"):
        [*read_documents(tmp_path / "long.jsonl.gz", "text")]
    (tmp_path / "long.txt.gz").write_bytes(gzip.compress(b"a" * 1001))
    with pytest.raises(DataError, match="more than 1,000 bytes, which is no one document"):
        [*read_documents(tmp_path / "long.txt.gz", "text")]
    (tmp_path / "long.txt").write_bytes(b"a" * 1001)
    assert len([*read_documents(tmp_path / "long.txt", "text")]) == 1
