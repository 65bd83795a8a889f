"""`gossamer check`: what it says of a run is what the run then does, and what is wrong with a file is said all at once."""

import json
import re
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import tomli_w
import torch
from test_tokenizer import trained
from test_virtual import timed

from commands import Command
from gossamer.cli import main
from gossamer.cli.check import lines
from gossamer.data.corpus import open_corpus
from gossamer.errors import ConfigError
from gossamer.layout import layout_of
from gossamer.models.llama import build_model
from gossamer.models.sizes import ModelConfig, parameter_count
from gossamer.network.links import Network, from_options
from gossamer.record.logs.trace import read_trace
from gossamer.report.table import summary_rows
from gossamer.rules import WRAPPERS
from gossamer.run.config.document import EXPERIMENT, flat, load_document
from gossamer.run.config.experiment_file import drafts
from gossamer.run.config.layouts import layout_for
from gossamer.run.config.resolve import resolve, run_faults, settings_of
from gossamer.run.config.run_file import dump, parse, survey
from gossamer.run.planning import check
from gossamer.run.planning.check import examine_document, examine_run, inner_copies, must_fit_its_store
from gossamer.run.simulated.simulate import simulate
from gossamer.run.worker.replica import Replica
from gossamer.run.worker.task import task_of
from gossamer.settings.user_code import is_code
from gossamer.transport.memory import MemoryTransport
from tiny import PARAMETERS, document, single, tiny

ROOT = Path(__file__).parents[3]
CONFIGS = [
    *sorted((ROOT / "src" / "gossamer" / "configs").glob("*.toml")),
    *sorted((ROOT / "experiments").rglob("*.toml")),
]
NETWORK = {"uplink_bps": [1e6, 1e6, 1e5, 1e6], "downlink_bps": 1e6, "latency_s": 0.01, "step_s": 0.1}


def written(tmp_path, **overrides):
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps(document(**overrides)))
    return path


@pytest.mark.sampled(20)
@pytest.mark.parametrize("path", CONFIGS, ids=[str(path.relative_to(ROOT)) for path in CONFIGS])
def test_every_file_that_comes_with_gossamer_can_start(path, capsys):
    """Of the runs of an experiment none has a fault; the table is made of the first."""
    file = load_document(path)
    if any(key in file for key in EXPERIMENT):
        first, *others = [draft.document for draft in drafts(file)]
        # Code that a file names is not imported by a check; tests/docs/test_experiments.py runs it.
        others = [one for one in others if not any(isinstance(own, str) and is_code(own) for own in flat(one).values())]
        found, wrong = examine_document(first)
        assert not wrong and all("per worker" in "\n".join(lines(one)) for one in found)
        assert not [sentence for one in others for sentence in survey(one).faults or run_faults(parse(one))]
        return
    assert main(["check", str(path)]) == 0
    out, err = capsys.readouterr()
    assert "can start" in out and "per worker" in out and not err


def test_a_run_without_rounds_sends_the_predicted_bytes_and_takes_about_the_predicted_time(tmp_path):
    run = timed(server__name="heloco", run__steps=32)
    examined = examine_run(run)
    outcome = simulate(run, tmp_path)
    pushed = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert {line["bytes"] for line in pushed if line["event"] == "push"} == {examined.sent_bytes}
    assert examined.tokens == outcome.tokens
    assert examined.networks[0].round_s == pytest.approx(outcome.time_s["clock"] / run.length.rounds, rel=0.1)


@pytest.mark.parametrize("optimizer", ["adamw", "accum_adamw", "sgd", "muon", "spectral_muon"])
@pytest.mark.parametrize("averaging", [None, "gpa", "schedule_free"])
def test_an_inner_optimizer_keeps_the_predicted_number_of_copies(optimizer, averaging):
    averages = {"inner__averaging": averaging} if averaging else {}
    run = single(inner__optimizer=optimizer, **averages)
    replica = Replica(0, settings_of(run), task_of(settings_of(run)), torch.device("cpu"))
    replica.local_phase(0)
    kept: dict[int, int] = {}

    def count(value):
        if isinstance(value, torch.Tensor) and value.numel() > 1:
            kept[value.data_ptr()] = value.numel()
        for inside in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
            count(inside)

    count(replica.optimizer.state_dict())
    assert inner_copies(run.inner, replica.layout) == pytest.approx(sum(kept.values()) / replica.x.numel(), rel=1e-6)


@pytest.mark.parametrize("config", [ModelConfig(), ModelConfig(size="1b", layers=2), ModelConfig(tie_embeddings=True)])
def test_the_layout_of_a_model_that_is_not_built_is_that_of_the_built_one(config):
    with torch.device("meta"):
        built = layout_of(build_model(config, 300, 16, 0))
    assert layout_for(config, 300) == built
    assert parameter_count(config, 300) == built.numel


def test_a_file_with_five_faults_prints_five_sentences(tmp_path, capsys):
    path = written(
        tmp_path,
        rule__name="diloco",
        topology__name="ring",
        codec__name="int8",
        schedule__fragments=3,
        schedule__inner_every=[1, 1],
        inner__optimizer="sgd",
        run__adapt="slow",
        run__reduction="all_reduce",
    )
    assert main(["check", str(path)]) == 2
    out, err = capsys.readouterr()
    words = [
        "schedule.fragments is 3",
        "inner.optimizer = 'sgd'",
        "run.adapt is 'slow'",
        "topology 'ring'",
        "'all_reduce'",
    ]
    assert not out and len(err.splitlines()) == 5
    assert all(any(word in line for line in err.splitlines()) for word in words)


def test_an_experiment_has_a_block_for_each_variant_and_faults_with_their_labels(tmp_path, capsys):
    path = tmp_path / "experiment.toml"
    good, bad = {"label": "good", "rule": {"name": "gossip"}}, {"label": "bad", "rule": {"name": "diloco"}}
    path.write_text(tomli_w.dumps({**document(), "variant": [good, {**good, "label": "better"}]}))
    assert main(["check", str(path)]) == 0
    blocks = capsys.readouterr().out.split("\n\n")
    assert [block.splitlines()[0] for block in blocks] == ["good: can start", "better: can start"]
    path.write_text(tomli_w.dumps({**document(), "variant": [good, bad]}))
    assert main(["check", str(path)]) == 2
    assert capsys.readouterr().err.startswith("gossamer: bad: rule 'diloco' on topology 'random'")


def test_the_table_as_an_object(tmp_path, capsys):
    path = written(tmp_path, network__even__uplink_bps=1e6, network__even__downlink_bps=1e6)
    assert main(["check", str(path), "--json", "--set", "run.steps=24"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["parameters"] == PARAMETERS and result["rounds"] == 12 and result["kept"][0]["what"] == "weights"
    assert result["networks"] == [
        {
            "name": "even",
            "round_s": None,
            "utilisation": None,
            "between_stages": None,
            "note": "unknown: network.even has no step_s",
            "spread_s": 0.0,
        }
    ]


def test_the_facts_of_a_tokenizer_on_the_hub_are_reported_as_unknown(tmp_path, capsys):
    assert main(["check", str(written(tmp_path, data__tokenizer="some/tokenizer"))]) == 0
    out = capsys.readouterr().out
    assert out.count("unknown without the tokenizer") >= 3 and "MB per worker" not in out


def test_a_tokenizer_file_that_is_missing_is_a_fault(tmp_path, capsys):
    assert main(["check", str(written(tmp_path, data__tokenizer=str(tmp_path / "none.json")))]) == 2
    assert "data.tokenizer" in capsys.readouterr().err


def check_and_read(words):
    """Checks a run file, and reads the text of files; in a process that has imported neither before."""
    heavy = {"transformers", "datasets", "tokenizers", "pyarrow"}
    assert not heavy & {*sys.modules}
    code = main(["check", *words])
    from gossamer.data.corpus import DataConfig, open_corpus

    open_corpus(DataConfig(max_bytes=100_000), workers=1, seed=0)
    print(sorted(heavy & {*sys.modules}))
    return code


def test_to_check_opens_no_text_and_neither_it_nor_reading_files_imports_a_heavy_package(tmp_path):
    path = written(tmp_path, data__source=str(tmp_path / "nothing.txt"))
    code, output = Command(path, work=check_and_read).finish()
    assert code == 0 and output.splitlines()[-1] == "[]", output


def test_a_codec_on_whole_parameters_is_warned_of_with_a_number_before_and_in_the_run(tmp_path, caplog):
    run = tiny(codec__name="int8", codec__rounding="stochastic", run__steps=2, data__max_bytes=200_000)
    (sentence,) = examine_run(run).warnings
    assert "'gasloc' sends whole parameters" in sentence and "% of their norm" in sentence
    simulate(run, tmp_path)
    assert sentence in caplog.text


def test_text_that_is_not_on_this_machine_is_warned_of():
    examined = examine_run(tiny(data__source="/nowhere/*.txt"))
    (sentence,) = examined.here
    assert sentence.startswith("data.source '/nowhere/*.txt' names no readable file")
    assert lines(examined)[0].endswith("can start, but not on this machine")


@pytest.mark.parametrize(("text", "most"), [("", 2), ("short", 7)])
def test_text_that_is_shorter_than_a_window_is_named_before_the_run(text, most, tmp_path):
    (path := tmp_path / "text.txt").write_text(text)
    examined = examine_run(tiny(data__source=str(path)))
    (sentence,) = examined.here
    assert f"at most {most} tokens, but one window needs data.seq_len + 1 = 17" in sentence and examined.passes is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"data__shards": [0, 1, 0]}, "of worker 1 is data.source .* and has at most 5 tokens"),
        ({"data__shards": [0, 1, 0], "data__max_bytes": 900}, "of worker 1 is data.source .* and has at most 2 tokens"),
        ({"data__shards": [0, 2, 0], "sources": "aba"}, "of worker 1 is data.source .* and has at most 0 tokens"),
        ({"data__shards": "contiguous", "data__seq_len": 400}, "of one of 3 workers has at most 302 tokens"),
    ],
)
def test_a_worker_whose_own_text_is_shorter_than_a_window_is_named_before_the_run(settings, words, tmp_path):
    for name, size in (("a", 900), ("b", 3)):
        (tmp_path / f"{name}.txt").write_text("x" * size)
    sources = [str(tmp_path / f"{name}.txt") for name in settings.get("sources", "ab")]
    given = {key: value for key, value in settings.items() if key != "sources"}
    examined = examine_run(tiny(data__source=sources, **given))
    assert (
        re.search(words + r", but one window needs data\.seq_len \+ 1 = ", examined.here[0]) and examined.passes is None
    )
    assert not examine_run(tiny(data__source=sources)).here


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"run__device": "cuda"}, "run.device = 'cuda' but torch sees 0 GPUs"),
        (
            {"pipeline__stages": 2, "data__accumulate": 2},
            "pipeline.stages in several processes needs torch 9.0 and this is",
        ),
        ({"record__wandb_project": "x"}, "record.wandb_project needs the package 'wandb'"),
        ({"record__trackio_project": "x"}, "record.trackio_project needs the package 'trackio'"),
        ({"record__tensorboard": True}, "record.tensorboard needs the package 'tensorboard'"),
        ({"record__prometheus_port": 9000}, "record.prometheus_port needs the package 'prometheus_client'"),
        ({"data__source": "hf:a/b", "data__tokenizer": "a/b"}, "data.tokenizer 'a/b' needs the package 'tokenizers'"),
    ],
)
def test_the_requirements_that_this_machine_lacks_for_a_run_are_listed(settings, sentence, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("gossamer.run.worker.stages.torch_stage.SINCE", "9.0")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert any(one.startswith(sentence) for one in examine_run(tiny(**settings)).here)


@pytest.mark.parametrize(
    ("settings", "verb"),
    [
        ({"run__wait": False}, "train"),
        ({"pair__name": "ad_psgd", "topology__name": "complete"}, "train"),
        ({"server__name": "heloco"}, "train"),
        ({"run__adapt": True, "run__local_steps": 2}, "train"),
        ({"record__hash": True, "pipeline__stages": 2, "data__accumulate": 2}, "simulate"),
    ],
)
def test_a_run_for_one_verb_only_can_start_with_that_one(settings, verb, tmp_path):
    """Without a declared network real processes measure their own seconds, and a simulation has none."""
    run = document(**settings)
    (found,), wrong = examine_document(run)
    assert not wrong and lines(found)[0].endswith(f": can start with gossamer {verb} only")
    resolve(parse(run), real=verb == "train")
    with pytest.raises(ConfigError) as caught:
        resolve(parse(run), real=verb != "train")
    assert str(caught.value) in found.refused["simulate" if verb == "train" else "train"]


def test_the_stages_of_a_worker_are_listed_with_layers_and_memory():
    examined = examine_run(tiny(pipeline__stages=2, data__accumulate=2, model__layers=3))
    assert examined.processes == 2 * examined.workers
    assert [k for stage in examined.stages for k in stage.layers] == [0, 1, 2]
    assert sum(stage.parameters for stage in examined.stages) == examined.parameters
    assert sum(stage.bytes for stage in examined.stages) == pytest.approx(examined.worker_bytes)
    assert any("stage 1" in line and "MB" in line for line in lines(examined))


def test_unknown_keys_of_an_experiments_own_tables_and_sizes_are_faults(tmp_path, capsys):
    path = tmp_path / "experiment.toml"
    own = {"figure": {"xx": "rule.lr"}, "tune": {"lrr": [1.0]}, "scale": {"big": {"modle.size": "1m"}}}
    path.write_text(tomli_w.dumps({**document(data__bach_size=2), **own, "variant": [{"label": "a"}, {"label": "b"}]}))
    assert main(["check", str(path)]) == 2
    err = capsys.readouterr().err
    for once in (
        "in [figure] 'xx'",
        "in [tune] 'lrr'",
        "scale.big: unknown key 'modle'",
        "gossamer: unknown key in [data]",
    ):
        assert err.count(once) == 1, err


def test_a_network_with_a_shared_site_prices_a_round():
    shared = {
        **NETWORK,
        "uplink_bps": 1e6,
        "sites": {"a": {"workers": [0, 1], "uplink_bps": 1e5}, "b": {"workers": [2]}},
    }
    base = document(rule__name="local_sgd", topology__name="complete") | {"network": {"shared": shared}}
    (found,), wrong = examine_document(base)
    assert not wrong and isinstance(from_options(shared, "shared"), Network)
    alone = examine_run(parse(base | {"network": {"alone": {**NETWORK, "uplink_bps": 1e6}}}))
    assert found.networks[0].round_s > alone.networks[0].round_s > 0  # type: ignore[operator]


def test_check_says_which_special_tokens_stand_around_a_document_or_that_none_ends_it(tmp_path, capsys):
    assert main(["check", str(written(tmp_path))]) == 0
    assert r"TEXT \x00, padded with \x00" in capsys.readouterr().out
    name = trained(tmp_path / "words")
    assert main(["check", str(written(tmp_path, data__tokenizer=name))]) == 0
    assert "<|bos|> TEXT <|im_end|>, padded with <|pad|>" in capsys.readouterr().out
    endless = trained(tmp_path / "endless", ("[A]",), None)
    assert main(["check", str(written(tmp_path, data__tokenizer=endless)), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["documents"] == {"before": [], "after": [], "padding": None}
    assert any("no token ends a document" in sentence for sentence in result["warnings"])


@pytest.mark.parametrize("topology", ["random", "ring", "star", "complete"])
def test_check_plays_a_few_of_many_workers_and_says_what_it_does_not_price(topology, monkeypatch):
    run = tiny(workers=12, topology__name=topology, network__even=NETWORK | {"uplink_bps": 1e6})
    whole = examine_run(run)
    monkeypatch.setattr("gossamer.run.planning.traffic.MOST_PLAYED", 3)
    few = examine_run(run)
    assert few.networks[0].note.startswith("unknown: a round of so many") and whole.networks[0].round_s
    alike = {"networks": (), "sent_bytes": 0.0} if topology == "star" else {"networks": ()}  # whose hub is one of few
    assert few._replace(**alike) == whole._replace(**alike)


@pytest.mark.parametrize(
    ("method", "size"),
    [
        ({"rule__name": "diloco", "topology__name": "complete", "run__elastic": True}, "19.4"),
        ({"server__name": "heloco"}, "11.6"),
    ],
    ids=["rounds", "server"],
)
def test_a_state_that_a_provider_does_not_take_in_one_object_is_named_before_the_run(method, size, tmp_path, capsys):
    large = tiny(model={"size": "1b"}, **method)
    sentence = f"the state of this run is an object of {size} GB, where S3 takes at most 5.37 GB in one"
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        must_fit_its_store(resolve(large, real=True), "s3://bucket/run")
    with pytest.raises(ConfigError, match=re.escape(f"of {size} GB, where Azure takes at most 5.24 GB in one")):
        must_fit_its_store(resolve(large, real=True), "az://container/run")
    must_fit_its_store(resolve(large, real=True), f"{tmp_path}")
    must_fit_its_store(resolve(tiny(**method), real=True), "s3://bucket/run")
    if "server__name" not in method:
        network = {"home": {"uplink_bps": 1e6, "downlink_bps": 1e6, "step_s": 0.1, "store": {"latency_s": 0.1}}}
        warned = [examine_run(tiny(model=model, network=network, **method)).warnings for model in ({"size": "1b"}, {})]
        assert [any(sentence in one for one in some) for some in warned] == [True, False]
    (tmp_path / "run.toml").write_text(dump(large))
    words = ["train", f"{tmp_path / 'run.toml'}", "--store", "s3://bucket/run", "--out", f"{tmp_path / 'out'}"]
    assert main(words) == 2 and sentence in capsys.readouterr().err


def test_a_simulation_that_does_not_fit_into_memory_is_refused_before_it_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=1_000_000))
    with pytest.raises(
        ConfigError, match=r"of 3 workers holds at least 0.0017 GB .* this machine has 0.001 GB; take fewer"
    ):
        simulate(tiny(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


HUGE = 10**12
BOUNDS = {
    "workers": "whole number from 1 to 1000000",
    "schedule.fragments": "use at most one fragment per inner step",
    "schedule.overlap_steps": "use at most",
    "run.local_steps": "not a multiple of run.local_steps",
    "pipeline.stages": "each stage needs one; take at most",
    "pipeline.chunks": "pipeline.chunks",
    "model.layers": "whole number from 1 to 2000",
    "model.hidden_size": "whole number from 1 to 1000000",
    "model.intermediate_size": "whole number from 1 to 1000000",
    "data.windows": "whole number from 1 to 100000000",
    "run.threads": "whole number from 0 to 1024",
    "model.experts.count": "whole number from 2 to 10000",
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("verb", ["check", "simulate"])
@pytest.mark.parametrize("key", BOUNDS)
def test_a_number_too_large_for_a_run_is_refused_before_anything_is_made_for_each(key, verb, tmp_path, capsys):
    out = ["--out", str(tmp_path / "run")] if verb == "simulate" else []
    chunks = ["--set", "pipeline.stages=2"] if key == "pipeline.chunks" else []
    tracemalloc.start()
    assert main([verb, str(written(tmp_path)), "--set", f"{key}={HUGE}", *chunks, *out]) == 2
    most_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    shown = capsys.readouterr().err
    assert BOUNDS[key] in shown and "Traceback" not in shown and most_bytes < 1e8


@pytest.mark.parametrize("key", ["run.steps", "run.eval_every", "data.batch_size"])
def test_a_number_that_only_lengthens_a_run_costs_its_check_nothing(key, tmp_path, capsys):
    assert main(["check", str(written(tmp_path)), "--set", f"{key}={HUGE}"]) == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"data__batch_size": HUGE}, r"a batch of 1,000,000,000,000 sequences .* smaller data\.batch_size"),
        (
            {"run__eval_batches": HUGE},
            r"validation on 1,000,000,000,000 times a batch of 2 .* smaller run\.eval_batches",
        ),
    ],
)
def test_batches_that_do_not_fit_into_memory_are_refused_before_they_are_drawn(settings, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        simulate(tiny(**settings), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    corpus = open_corpus(tiny().data, 1, 0)
    with pytest.raises(ConfigError, match=r"smaller run\.eval_batches"):  # as real workers and evaluate read it
        corpus.validation(HUGE)
    if "data__batch_size" in settings:
        with pytest.raises(ConfigError, match=words):
            open_corpus(tiny(**settings).data, 1, 0)


@pytest.mark.parametrize("topology", ["complete", "pga", "exponential", "star"])
def test_check_plays_few_messages_however_many_workers_and_rounds_there_are(topology, monkeypatch):
    posted, post = list[int](), MemoryTransport.post
    monkeypatch.setattr(MemoryTransport, "post", lambda one, *rest: (posted.append(rest[1]), post(one, *rest))[1])
    monkeypatch.setattr("gossamer.run.planning.traffic._MOST_MESSAGES", 2_000)
    rule = {"name": "diloco"} if topology == "complete" else {"name": "gasloc"}
    assert examine_run(tiny(workers=200, topology__name=topology, run__steps=24, rule=rule)).sent_bytes
    assert 0 < len(posted) <= 2_000


def test_check_says_which_rounds_it_has_counted_where_a_period_is_too_long(monkeypatch):
    run = tiny(topology={"name": "pga", "every": 50}, run__steps=200)
    assert not any("first" in sentence for sentence in examine_run(run).warnings)
    monkeypatch.setattr("gossamer.run.planning.traffic._MOST_ROWS", 30)
    assert "what is sent was counted in the first 10 of 50 rounds alone" in examine_run(run).warnings


@pytest.mark.parametrize("wrapped", WRAPPERS)
def test_check_counts_what_a_wrapped_rule_sends(wrapped):
    rule = "gasloc" if wrapped in ("anchored", "restarted") else "diloco"
    assert examine_run(tiny(rule={"name": rule, wrapped: {}}, topology__name="complete")).sent_bytes


def test_a_small_text_that_is_repeated_many_times_is_warned_of_before_and_after_a_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tiny.txt").write_text("a word " * 2_000)
    config = single(data__source=str(tmp_path / "tiny.txt"), run__steps=4, workers=2, run__eval_every=0)
    (few,), _ = examine_document(document(data__source=str(tmp_path / "tiny.txt"), run__steps=4, workers=2))
    assert few.passes == pytest.approx(4 * 2 * 32 / 14_002) and not few.warnings
    many = document(data__source=str(tmp_path / "tiny.txt"), run__steps=4_000, workers=2)
    (one,), wrong = examine_document(many)
    assert not wrong and one.passes == pytest.approx(4_000 * 2 * 32 / 14_002)
    assert any("the text is trained on about 18.28 times; above 4 times" in sentence for sentence in one.warnings)
    assert any(re.search("passes over the text +at least 18.3", line) for line in lines(one))
    (sources,), _ = examine_document(
        {**many, "data": {**many["data"], "source": [many["data"]["source"]], "shards": [0, 0]}}
    )
    assert sources.passes == one.passes / 2, "each of two workers reads all of it"
    (cut,), _ = examine_document({**many, "data": {**many["data"], "max_bytes": 7_000}})
    assert cut.passes == pytest.approx(4_000 * 2 * 32 / 7_002)

    simulate(config, tmp_path / "run", until=1)
    assert "the text is trained on" not in caplog.text
    text = json.loads((tmp_path / "run" / "text.json").read_text())
    read = text["sources"]
    (row,) = summary_rows({"a": tmp_path / "run"}, {})
    assert row["passes"] == 2 * 2 * 32 / read[0]["train_tokens"]
    simulate(replace(config, run=replace(config.run, steps=4_000)), tmp_path / "long", until=1)
    assert "the text is trained on about 18.28" in caplog.text
    read[0]["train_tokens"] = 16
    (tmp_path / "run" / "text.json").write_text(json.dumps(text))
    caplog.clear()
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "page.html")]) == 0
    assert "tiny: the text is trained on about 8 times" in caplog.text
    assert "passes over the text" in (tmp_path / "page-table.md").read_text()


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_file_of_text_without_the_field_is_named_before_a_run(kind: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "words"}\n{"body": "not looked at here"}\n')
    if kind == "jsonl":
        (tmp_path / "b.jsonl").write_text('\n{"body": "words"}\n')
    else:
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pytest.importorskip("pyarrow").table({"body": ["words"]}), tmp_path / "b.parquet")
    (one,), _ = examine_document(document(data__source=str(tmp_path)))
    assert re.search(rf"b\.{kind}' has no field 'text'; it has: body", one.here[0]), one.here
    assert "can start, but not on this machine" in lines(one)[0]
    (fine,), _ = examine_document(document(data__source=str(tmp_path), data__max_bytes=20))
    assert not fine.here, "a file that is not read may hold anything"


def test_a_run_that_changes_on_its_way_has_the_mean_price_of_its_rounds_and_the_least_stable_numbers():
    network = {"wan": {"uplink_bps": 1e6, "downlink_bps": 1e6, "latency_s": 0.01, "step_s": 0.5}}

    def examined(**settings):
        (found,), wrong = examine_document({**document(**settings), "network": network})
        assert not wrong
        return found

    one, four = (examined(run__local_steps=h, run__steps=12) for h in (1, 4))
    both = examined(run__local_steps={"0": 1, "5": 4}, run__steps=13)
    assert both.networks[0].round_s == pytest.approx((5 * one.networks[0].round_s + 2 * four.networks[0].round_s) / 7)
    parallel = examined(run__local_steps=1, rule__name="data_parallel", topology__name="complete")
    started = examined(run__local_steps=4, run__steps=15, run__synchronous_steps=3)
    mean_s = (3 * parallel.networks[0].round_s + 3 * four.networks[0].round_s) / 6
    assert started.networks[0].round_s == pytest.approx(mean_s) and "after 3 synchronous steps" in started.method
    network["wan"]["changes"] = [{"at_s": both.networks[0].round_s * 6, "worker": 0, "factor": 0.5}]
    (note,) = (one.note for one in examined(run__local_steps={"0": 1, "5": 4}, run__steps=13).networks)
    assert "the mean of 2 parts of the run, each priced as from the start, and the network changes after" in note
    del network["wan"]["changes"]
    least = examined(rule__momentum={"0": 0.2, "4": 0.6, "8": 0.4})
    assert least.disagreement == examined(rule__momentum=0.6).disagreement > examined(rule__momentum=0.4).disagreement


def test_tokens_are_at_most_as_many_where_local_steps_adapt():
    network = {"network": {"wan": {"uplink_bps": 1e6, "downlink_bps": 1e6, "latency_s": 0.01, "step_s": 0.5}}}
    means = {"rule__name": "dilocox", "topology__name": "complete", "rule__adapt_every": 2, "run__steps": 16}
    for settings, who in (
        ({"run__adapt": True}, "run.adapt"),
        (means | {"run__local_steps": {"0": 4, "8": 2}}, "the rule"),
    ):
        (examined,), wrong = examine_document({**document(**settings), **network})
        assert not wrong and f"at the local steps that {who} begins with" in examined.networks[0].note
        assert any(re.search(r"length .* at most [\d,]+ tokens", line) for line in lines(examined))
    assert not any("at most" in line for line in lines(examine_run(tiny())) if "length" in line)


def test_parts_of_few_rounds_send_the_moments_as_often_as_the_whole_run(tmp_path):
    """Moments are sent in every third and sixth round, of which a part of one round has none or all."""
    steps = {str(step): 2 if step % 5 == 0 else 3 for step in range(30) if step % 5 in (0, 2)}
    given = {"rule__name": "local_sgd", "topology__name": "complete", "schedule__inner_every": [3, 6]}
    config = single(run__steps=30, run__local_steps=steps, run__eval_every=0, **given)
    simulate(config, tmp_path)
    trace = read_trace(tmp_path)
    assert examine_run(config).sent_bytes == pytest.approx(trace.sent_bytes.sum() / 3 / trace.rounds, rel=0.01)


def test_of_a_run_with_many_parts_each_that_is_priced_stands_for_its_neighbours(monkeypatch: pytest.MonkeyPatch):
    """Early rounds of `qsr` are many and short, late ones few and long."""
    network = {"wan": {"uplink_bps": 1e6, "downlink_bps": 1e6, "latency_s": 0.01, "step_s": 0.5}}

    def round_s() -> float:
        grows = {"shape": "qsr", "base": 2, "alpha": 0.005}
        inner = {"inner__lr": 2e-3, "inner__warmup_steps": 50}
        (found,), wrong = examine_document(
            {**document(run__local_steps=grows, run__steps=1500, **inner), "network": network}
        )
        assert not wrong and found.networks[0].round_s is not None
        return found.networks[0].round_s

    some = round_s()
    monkeypatch.setattr(check, "_MOST_PARTS", 10**6)
    assert some == pytest.approx(round_s(), rel=0.03)
