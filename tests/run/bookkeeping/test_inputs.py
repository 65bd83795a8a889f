"""What a run was computed from: what has changed since is named, and code that a stranger names is not run."""

import hashlib
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_samples import SAMPLES

import gossamer
from commands import Command, done, free_port, run
from gossamer.errors import ConfigError, DataError
from gossamer.record.inputs import Inputs, read_inputs, state_key, write_inputs
from gossamer.run.config.run_file import dump, parse
from tiny import document

LAN = {"uplink_bps": 1e9, "downlink_bps": 1e9, "step_s": 1}
STEPS = ("--set", "run.steps=8")
PARTS = (SAMPLES / "small_parts.py").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder to start from, with a text; and a user who has run nothing yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    shutil.copyfile(SAMPLES / "small_text.txt", "text.txt")


def run_file(name: str = "a.toml", **overrides: Any) -> Path:
    """A run of two workers on that text, which takes a moment."""
    small = {
        "workers": 2,
        "model__hidden_size": 8,
        "model__intermediate_size": 8,
        "model__layers": 1,
        "data__source": "text.txt",
        "data__seq_len": 8,
        "data__val_fraction": 0.2,
        "record__hash": True,
        "run__steps": 4,
        "run__local_steps": 2,
        "run__eval_every": 2,
        "run__eval_batches": 1,
        "run__timeout_s": 20,
        "inner__optimizer": "sgd",
    }
    Path(name).write_text(dump(parse(document(**{**small, **overrides}))))
    return Path(name)


def code_file(monkeypatch: pytest.MonkeyPatch, module: str, **overrides: Any) -> Path:
    """A run of the user's own model, loss and batches, which a module in the current folder and a helper of it have."""
    monkeypatch.syspath_prepend(os.getcwd())
    Path(f"{module}_seeds.py").write_text("FACTOR = 1000\n")
    own = PARTS.replace("1000 *", f"{module}_seeds.FACTOR *").replace(
        "import torch\n", f"import {module}_seeds\nimport torch\n"
    )
    Path(f"{module}.py").write_text(own)
    parts = {
        "model": {"size": f"{module}:net", "loss": f"{module}:square"},
        "data": {"source": f"{module}:batch", "validation": f"{module}:held_out", "seq_len": 1, "batch_size": 4},
    }
    given = {
        "name": "own",
        "workers": 2,
        "rule": {"name": "gasloc"},
        "topology": {"name": "complete"},
        **parts,
        "inner": {"optimizer": "sgd"},
        "record": {"hash": True, "export": False},
        "run": {"steps": 4, "local_steps": 2, "eval_every": 2, "eval_batches": 1, "checkpoint_every": 2, "threads": 1},
    }
    file = Path(f"{module}.toml")
    file.write_text(dump(parse({**given, **overrides})))
    return file


def files_in(folder: Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".lock" not in path.name
    }


def refused(*words: object) -> str:
    code, output = run(*words)
    assert code == 2, output
    assert "Traceback" not in output
    return output


LACKING: dict[str, str] = {"this version": "", "0.2.0": "inputs*.json", "the part of a second machine": "*.json"}
"""Who wrote a folder, and which files it lacks then."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["rounds", "virtual time"])
def test_a_text_that_has_changed_is_named_and_no_worker_is_accused_and_nothing_is_written(kind: str) -> None:
    clocked = {
        "run__wait": False,
        "record__hash": False,
        "network": {"lan": LAN},
    }
    done("simulate", run_file(**(clocked if kind == "virtual time" else {})), "--out", "whole", "--quiet")
    text = Path("text.txt").read_text()
    for of, lacking in LACKING.items():
        folder = Path(shutil.copytree("whole", of.replace(" ", "-")))
        for path in folder.glob(lacking) if lacking else ():
            path.unlink()
        Path("text.txt").write_text(text.replace("worker", "walker"))
        before = files_in(folder)
        steps = STEPS if kind == "rounds" else ()
        verbs = [["evaluate", folder], ["simulate", "--resume", folder, *steps]]
        verbs += [["audit", folder]] if kind == "rounds" else []
        if kind == "virtual time" and of == "the part of a second machine":
            verbs.pop(0)  # a checkpoint of all workers together
        for words in verbs:
            output = refused(*words)
            assert "the text of data.source 'text.txt' is " in output and "restore its files as they were" in output, (
                of,
                output,
            )
            assert (
                "differs in what it sent" not in output
                and "remove the checkpoint" not in output
                and "rule" not in output
            )
        assert files_in(folder) == before
        done("evaluate", folder, "--source", "text.txt")
        Path("text.txt").write_text(text)
    done("simulate", "--resume", "whole", *(STEPS if kind == "rounds" else ()), "--quiet")
    done("evaluate", "whole")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["rounds", "elastic", "no waiting", "server"])
def test_real_workers_record_what_they_begin_with_and_resume_on_the_same_text_alone(
    kind: str, request: pytest.FixtureRequest
) -> None:
    if kind not in ("rounds", "elastic") and not request.config.getoption("--full"):
        pytest.skip("a sample of the kinds is in CI")
    kinds: dict[str, dict[str, Any]] = {
        "elastic": {"run__elastic": True, "rule": "gossip", "topology": "complete"},
        "no waiting": {"run__wait": False, "rule": "gossip", "topology": "complete", "record__hash": False},
        "server": {"server": "heloco", "record__hash": False},
    }
    file = run_file(**kinds.get(kind, {}))
    done("train", file, "--local", 2, "--out", "k", "--quiet")
    owners = {0, 1, 2} if kind == "server" else {0, 1}
    assert {path.name for path in read_inputs(Path("k"))} == {f"inputs-{owner:03}.json" for owner in owners}
    Path("text.txt").write_text(Path("text.txt").read_text().replace("worker", "walker"))
    output = refused("train", "--resume", "k", "--local", 2, *(() if kind == "no waiting" else STEPS), "--quiet")
    assert "the text of data.source 'text.txt' is not the one that the run in 'k' had" in output, output


@pytest.mark.timeout(120)
def test_workers_of_an_elastic_run_that_start_with_other_texts_name_the_text() -> None:
    file = run_file(run__elastic=True, rule="gossip", topology="complete", run__timeout_s=15)
    Path("other").mkdir()
    Path("other/text.txt").write_text(Path("text.txt").read_text() + "!")
    place = {
        "GOSSAMER_SECRET": "s" * 40,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
    }
    first = Command("train", file, "--out", "k0", work=None, **place, RANK="0")
    os.chdir("other")
    second = Command("train", Path("..") / file, "--out", "k1", work=None, **place, RANK="1")
    codes, output = zip(*[one.finish(60) for one in (first, second)], strict=True)
    assert codes == (2, 2), output
    assert all("the text of data.source = " in one for one in output), output


def test_a_tokenizer_that_has_changed_is_named() -> None:
    pytest.importorskip("tokenizers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    def train(words: list[str]) -> None:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        tokenizer.train_from_iterator(
            words, trainers.BpeTrainer(vocab_size=262, initial_alphabet=alphabet, show_progress=False)
        )
        tokenizer.save("tok.json")

    train(["the worker waits for the server"] * 9)
    done("simulate", run_file(data__tokenizer="tok.json"), "--out", "k", "--quiet")
    train(["quick brown foxes jump over lazy dogs"] * 9)
    for words in (
        ["evaluate", "k"],
        ["evaluate", "k", "--source", "text.txt"],
        ["audit", "k"],
        ["simulate", "--resume", "k", *STEPS],
    ):
        output = refused(*words)
        assert "the tokenizer of data.tokenizer 'tok.json' is not the one that the run in 'k' had" in output, output


@pytest.mark.full
@pytest.mark.parametrize("where", ["the module", "a module that it imports"])
def test_code_that_has_changed_is_named_and_taken_for_a_resume_and_a_score_alone(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = "own_a" if where == "the module" else "own_b"
    file = code_file(monkeypatch, module)
    done("simulate", file, "--out", "k", "--quiet")
    done("evaluate", "k")  # a folder of this user's needs no word
    done("audit", "k")
    changed = Path(f"{module}.py" if where == "the module" else f"{module}_seeds.py")
    changed.write_text(changed.read_text() + "\n# another line\n")
    evaluated, before = Path("k/metrics-evaluated.jsonl"), files_in(Path("k"))
    simulated = ["simulate", "--resume", "k", *STEPS, "--quiet"]
    replays = ["simulate", file, "--replay", "k", "--out", "r"]
    resumes = [simulated, ["simulate", file, "--resume", "auto", "--out", "k"]]
    for words in (["evaluate", "k"], ["audit", "k"], ["audit", "k", "--allow-code"], replays, *resumes):
        output = refused(*words)
        assert f"the code of data.source '{module}:batch' has changed since the run in 'k' began" in output, output
        assert f"{module}.py'" in output
        assert ("give --allow-code" in output) is (words[0] == "evaluate" or "--resume" in words), output
    assert files_in(Path("k")) == before
    assert "has changed since" in done("evaluate", "k", "--allow-code") or "has changed since" in caplog.text
    assert not evaluated.exists() or evaluated.read_bytes() == before[str(evaluated)]
    done(*simulated, "--allow-code")
    done("evaluate", "k")  # what it resumed with is recorded


def test_facts_that_an_older_version_did_not_record_are_named_once_and_not_compared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    done("simulate", code_file(monkeypatch, "own_c"), "--out", "k", "--quiet")
    Path("k/inputs.json").unlink()
    caplog.set_level(logging.WARNING)
    refused("evaluate", "k")
    done("evaluate", "k", "--allow-code")
    assert caplog.text.count("'k' does not say what it was when the run began") == 1


@pytest.mark.parametrize("name", ["os:system", "builtins:exec", "torch:os.system", "subprocess:run"])
def test_a_run_file_takes_nothing_of_the_standard_library(name: str) -> None:
    run_file("evil.toml")
    text = (
        Path("evil.toml")
        .read_text()
        .replace('[rule]\nname = "gasloc"', f'[rule]\nname = "{name}"\ncommand = "touch gone-wrong"')
    )
    Path("evil.toml").write_text(text)
    for words in (["simulate", "evil.toml"], ["train", "evil.toml", "--local", 2]):
        output = refused(*words)
        assert f"rule.name is '{name}', which is of Python's standard library" in output, output
        assert f"names Python code, which runs with your rights: {name}" in output, "it says so first"
    assert not Path("gone-wrong").exists()


def test_a_folder_from_elsewhere_runs_no_code_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    file = code_file(monkeypatch, "own_d")
    done("simulate", file, "--out", "k", "--quiet")
    Path("own_e.py").write_text("open('gone-wrong', 'w').close()\n" + Path("own_d.py").read_text())
    sent = Path(shutil.copytree("k", "sent"))  # with a mark of this user's, which somebody was sent once
    (sent / "run.toml").write_text((sent / "run.toml").read_text().replace("own_d:", "own_e:"))
    forged = json.loads((sent / "inputs.json").read_text().replace("own_d", "own_e"))
    before = files_in(Path())
    verbs = [
        ["audit", sent],
        ["evaluate", sent],
        ["simulate", "--resume", sent, *STEPS],
        ["simulate", "--replay", sent, "--out", "r"],
        ["train", "--resume", sent, "--local", 2, *STEPS],
    ]
    for words in verbs:
        output = refused(*words)
        assert f"'{sent}' names Python code" in output and "own_e:batch" in output and "give --allow-code" in output, (
            output
        )
    with pytest.raises(ConfigError, match="names Python code"):
        gossamer.simulate(sent)
    assert files_in(Path()) == before
    (sent / "inputs.json").write_text(json.dumps(forged))  # as its sender would like it to be
    assert "names Python code" in refused("audit", sent)
    # Code that this user has run, with other options; and in another place.
    (sent / "run.toml").write_text(
        (Path("k") / "run.toml").read_text().replace("[model]\n", "[model]\noptions = {bias = false}\n")
    )
    shutil.copyfile("k/inputs.json", sent / "inputs.json")
    assert "names Python code" in refused("audit", sent)
    assert not Path("gone-wrong").exists()
    # The sender's own key is none here, and neither is another user's.
    monkeypatch.setenv("XDG_STATE_HOME", str(Path("elsewhere").resolve()))
    assert "has no record of having run it" in refused("audit", "k")
    done("audit", "k", "--allow-code")


def test_a_state_folder_that_cannot_be_written_means_that_the_option_is_needed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null/state")
    done("simulate", code_file(monkeypatch, "own_f"), "--out", "k", "--quiet")
    assert caplog.text.count("'/dev/null/state/gossamer/run-folders.key' could not be written") == 1
    assert "'/dev/null/state/gossamer/run-folders.key' cannot be read" in refused("simulate", "--resume", "k", *STEPS)
    done("simulate", "--resume", "k", *STEPS, "--allow-code", "--quiet")


def test_the_key_is_for_its_owner_alone_and_is_made_once(tmp_path: Path) -> None:
    assert state_key(make=False).key == b"" and not (tmp_path / "state").exists(), "looking makes none"
    first = state_key(make=True)
    assert len(first.key) == 32 and state_key(make=True) == first == state_key(make=False)
    assert first.path.stat().st_mode & 0o777 == 0o600 and first.path.parent.stat().st_mode & 0o777 == 0o700
    first.path.chmod(0o644)
    assert state_key(make=True).key == b"" and "chmod 600" in state_key(make=True).why


def test_a_run_without_code_leaves_no_key(tmp_path: Path) -> None:
    done("simulate", run_file(), "--out", "k", "--quiet")
    assert not (tmp_path / "state").exists()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("spoilt", ["", "[]", "{", '{"format": 1}', '{"format": 2}'])
def test_a_damaged_record_of_inputs_is_not_an_absent_one(spoilt: str) -> None:
    done("simulate", run_file(), "--out", "k", "--quiet")
    Path("k/inputs.json").write_text(spoilt)
    for words in (["evaluate", "k"], ["audit", "k"], ["simulate", "--resume", "k", *STEPS]):
        assert "k/inputs.json" in refused(*words)


def test_a_digest_that_differs_is_explained_by_what_differs() -> None:
    done("simulate", run_file(), "--out", "whole", "--quiet")
    resume = ("simulate", "--resume", "k", *STEPS, "--quiet")

    def folder() -> Path:
        shutil.rmtree("k", ignore_errors=True)
        return Path(shutil.copytree("whole", "k"))

    def edit(old: str, new: str) -> None:
        path = folder() / "run.toml"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    edit("seed = 0", "seed = 7")
    assert "run.toml was changed since: seed was 0 and is 7 in run.toml; put it back" in refused(*resume)
    edit("lr = 0.001", "lr = 0.01")
    output = refused(*resume)
    assert "inner.lr was 0.001 and is 0.01 in run.toml; put it back, and resume with --set inner.lr=0.01" in output
    assert output.count("has digest") == 1  # not for each worker and round
    path = folder() / "inputs.json"
    older = {**json.loads(path.read_text()), "gossamer": "0.9.0", "digest": "0" * 16}
    path.write_text(json.dumps(older))
    for manifest in Path("k/checkpoints").rglob("*.json"):
        _sealed_anew(manifest, older["digest"])
    output = refused(*resume)
    assert "gossamer 0.9.0 wrote them and computed the digest 0000000000000000 from the same settings" in output, output
    assert "run.toml was changed" not in output and "--out" not in output
    path.unlink()
    assert "run.toml was changed by hand, or they are of another run, or of another version of gossamer" in refused(
        *resume
    )


def _sealed_anew(manifest: Path, digest: str) -> None:
    _, _, body = manifest.read_bytes().partition(b"\n")
    content = json.loads(b"{" + body)
    body = json.dumps({**content, "digest": digest}).removeprefix("{").encode()
    manifest.write_bytes(f'{{"manifest_sha256": "{hashlib.sha256(body).hexdigest()}",\n'.encode() + body)


def test_what_is_written_of_inputs_is_read_back(tmp_path: Path) -> None:
    one: Inputs = {
        "format": 1,
        "gossamer": "1",
        "digest": "d",
        "settings": {"a.b": [1, None, "inf"]},
        "found": {},
        "own": {},
        "code": [],
        "mark": "",
    }
    write_inputs(tmp_path, one, 3, part=1, parts=2)
    assert read_inputs(tmp_path) == {tmp_path / "inputs-003-1.json": one}
    (tmp_path / "inputs-004.json").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"inputs-004\.json"):
        read_inputs(tmp_path)


def test_files_of_tokens_that_changed_where_a_checkpoint_does_not_look_are_named() -> None:
    tokens = np.random.default_rng(0).integers(0, 256, 400_000).astype("<u2")
    tokens.tofile("tokens.bin")
    done("simulate", run_file(data__source="tokens.bin"), "--out", "k", "--quiet")
    tokens[100_000] ^= 1  # beyond the samples from its beginning, middle and end
    tokens.tofile("tokens.bin")
    for words in (["evaluate", "k"], ["audit", "k"], ["simulate", "--resume", "k", *STEPS]):
        assert "the content of the token files of data.source 'tokens.bin' is not the one" in refused(*words)
