"""The seconds of an inner step of a pipeline."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from gossamer.cli import main
from gossamer.cli.check import lines
from gossamer.errors import ConfigError, DataError
from gossamer.models.sizes import ModelConfig
from gossamer.network.inner_steps import inner_steps
from gossamer.network.links import Network, from_toml, to_toml
from gossamer.network.pipeline_time import Pass, StageLinks, microbatch_order, pipeline_step
from gossamer.network.pricing import price
from gossamer.record.folder import read_metrics
from gossamer.record.lineage import write_branches
from gossamer.record.logs.pipeline_work import PipelineWork, read_pipeline, write_pipeline
from gossamer.record.logs.seconds import read_seconds
from gossamer.record.logs.stage_seconds import read_stages
from gossamer.record.logs.trace import read_trace
from gossamer.report.page.live import LiveRuns
from gossamer.report.results import read_results
from gossamer.report.table import summary_rows
from gossamer.run.config.experiment_file import Point
from gossamer.run.config.layouts import layout_for
from gossamer.run.config.resolve import settings_of
from gossamer.run.experiments.compare import train_all
from gossamer.run.planning.check import examine_run
from gossamer.run.simulated.simulate import simulate
from gossamer.run.worker.stages.timing import in_stages, pipeline_work
from tiny import preset as tiny

LAYOUT = layout_for(ModelConfig(size="0.2m", layers=4), 256)
FAR = {
    "model__layers": 4,
    "data__accumulate": 4,
    "workers": 2,
    "run__steps": 4,
    "pipeline__stages": 2,
    "method": "diloco",
    "network__far": {
        "uplink_bps": 1e9,
        "downlink_bps": 1e9,
        "step_s": 2.0,
        "stages": {"bandwidth_bps": 1e4},
    },
}
"""A run whose stages are far from each other."""
BOTH = pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])


def step_s_of(network, config):
    return in_stages(network, settings_of(config), LAYOUT).network.step_s


@BOTH
@given(stages=st.integers(1, 6), micro=st.integers(1, 9))
def test_each_stage_passes_each_micro_batch_forward_before_backward_and_both_in_order(schedule, stages, micro):
    for stage in range(stages):
        order = microbatch_order(schedule, stage, stages, micro)
        for forward in (True, False):
            assert [one.micro_batch for one in order if one.forward == forward] == [*range(micro)]
        assert all(order.index(Pass(True, k)) < order.index(Pass(False, k)) for k in range(micro))


@pytest.mark.parametrize(("stages", "micro", "chunks"), [(2, 4, 2), (3, 6, 2), (4, 8, 3), (2, 6, 4)])
def test_interleaved_stages_compute_in_the_order_of_torch(stages, micro, chunks):
    class Torchs(ScheduleInterleaved1F1B):
        def __init__(self):
            self.pp_group_size, self.n_local_stages, self._n_microbatches = stages, chunks, micro
            self.number_of_rounds = max(1, micro // stages)
            self.microbatches_per_round = micro // self.number_of_rounds

    for stage in range(stages):
        theirs = [one for one in Torchs()._calculate_single_rank_operations(stage) if one is not None]
        ours = microbatch_order("interleaved", stage, stages, micro, chunks)
        assert [(one.chunk * stages + stage, one.forward, one.micro_batch) for one in ours] == [
            (one.stage_index, one.computation_type.name == "FORWARD", one.microbatch_index) for one in theirs
        ]


@given(stages=st.integers(1, 4), groups=st.integers(1, 4), chunks=st.integers(1, 3))
def test_over_links_that_cost_nothing_interleaved_stages_idle_for_one_pass_through_a_piece_of_each_other_stage(
    stages, groups, chunks
):
    pieces, micro = stages * chunks, stages * groups
    nothing = [0] * (pieces - 1)
    step = pipeline_step([1.0] * pieces, [2.0] * pieces, nothing, nothing, micro, StageLinks(), "interleaved", chunks)
    assert step.seconds == pytest.approx(3 * (micro * chunks + stages - 1))
    assert step.compute_s == pytest.approx([3 * micro * chunks] * stages)


def test_1f1b_holds_no_more_activations_than_there_are_stages_to_come():
    for stage in range(4):
        held = most = 0
        for one in microbatch_order("1f1b", stage, 4, 16):
            held += 1 if one.forward else -1
            most = max(most, held)
        assert most == 4 - stage


@BOTH
@given(stages=st.integers(1, 5), micro=st.integers(1, 8), forward=st.floats(0.1, 3))
def test_over_links_that_cost_nothing_even_stages_idle_for_one_pass_of_each_other_stage(
    schedule, stages, micro, forward
):
    step = pipeline_step(
        [forward] * stages,
        [2 * forward] * stages,
        [9] * (stages - 1),
        [9] * (stages - 1),
        micro,
        StageLinks(),
        schedule,
    )
    assert step.seconds == pytest.approx(3 * forward * (micro + stages - 1))
    assert step.compute_s == pytest.approx([3 * forward * micro] * stages)


@BOTH
@given(micro=st.integers(1, 8), latency=st.floats(0, 1), sizes=st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)))
def test_a_slower_link_is_never_faster_and_a_serialised_one_the_slowest(schedule, micro, latency, sizes):
    there, back = ([size, size] for size in sizes)

    def seconds(bps, **more):
        return pipeline_step(
            [0.1] * 3, [0.2] * 3, there, back, micro, StageLinks(bandwidth_bps=bps, latency_s=latency, **more), schedule
        ).seconds

    times = [seconds(bps) for bps in (1e9, 1e8, 1e7, 1e6)]
    assert all(a <= b + 1e-9 for a, b in pairwise(times))
    assert seconds(1e7) <= seconds(1e7, duplex="half") + 1e-9
    assert seconds(1e7) <= seconds(1e7, serialised=True) + 1e-9


@pytest.mark.parametrize(
    ("micro", "tokens", "bytes_per_token", "measured_s"), [(64, 8192, 2048, 100.475), (32, 16384, 322, 19.889)]
)
def test_a_serialised_link_reproduces_published_steps_of_eight_stages(micro, tokens, bytes_per_token, measured_s):
    """Pluralis' ProtocolNanoGPT: 200 Mbit/s, 50 ms, one clock per stage for what comes in; dense, and a subspace of 160."""
    links, size = StageLinks(bandwidth_bps=2e8, latency_s=0.05, serialised=True), [tokens * bytes_per_token] * 7
    step = pipeline_step([0.0] * 8, [0.0] * 8, size, size, micro, links, "1f1b")
    assert step.seconds == pytest.approx(measured_s, rel=0.02)  # which computed a little besides


def test_a_run_with_interleaved_stages_is_priced_by_its_schedule():
    links = StageLinks(bandwidth_bps=1e12, speeds=(1.0, 0.5))
    network = Network(uplink_bps=1e9, downlink_bps=1e9, step_s=6.0, stages=links)
    both = {"model__layers": 4, "data__accumulate": 4, "workers": 2, "pipeline__stages": 2}
    plain = step_s_of(network, tiny(**both, pipeline__schedule="1f1b"))
    pieces = step_s_of(network, tiny(**both, pipeline__schedule="interleaved", pipeline__chunks=2))
    assert isinstance(plain, float) and isinstance(pieces, float) and 0.7 * plain < pieces < plain


def test_numbers_that_do_not_fit_are_refused():
    for micro, chunks, schedule in ((4, 3, "interleaved"), (5, 2, "interleaved"), (4, 2, "gpipe")):
        with pytest.raises(ConfigError, match=f"4 pieces and {micro} micro-batches was given {chunks} chunks"):
            pipeline_step([1] * 4, [1] * 4, [1] * 3, [1] * 3, micro, StageLinks(), schedule, chunks)
    with pytest.raises(ConfigError, match="2 and 2 stages, 2 and 1 boundaries"):
        pipeline_step([1, 1], [1, 1], [1, 1], [1], 4, StageLinks())


def test_a_run_in_stages_takes_the_seconds_of_its_pipeline_and_one_in_one_piece_those_of_the_file():
    network = Network(uplink_bps=1e9, downlink_bps=1e9, step_s=(6.0, 12.0))
    whole = tiny(model__layers=4, data__accumulate=4, workers=2)
    assert in_stages(network, settings_of(whole), LAYOUT).network is network
    cut = tiny(model__layers=4, data__accumulate=4, workers=2, pipeline__stages=2)
    even = step_s_of(network, cut)
    assert isinstance(even, tuple) and even[1] == pytest.approx(2 * even[0])
    assert (
        6.0 * 5 / 4 / 2 < even[0] < 6.0 * 5 / 4 * 0.55
    )  # a bubble of one micro-batch; the head makes the last stage longer
    slow = replace(network, stages=StageLinks(bandwidth_bps=1e5))
    packed = tiny(
        model__layers=4,
        data__accumulate=4,
        workers=2,
        pipeline__stages=2,
        pipeline__forward="intk",
        pipeline__backward="intk",
    )
    slowed, packed_s = step_s_of(slow, cut), step_s_of(slow, packed)
    assert isinstance(slowed, tuple) and isinstance(packed_s, tuple) and even[0] < packed_s[0] < slowed[0]
    halting = step_s_of(replace(network, stages=StageLinks(speeds=(1.0, 1e-3))), cut)
    assert isinstance(halting, tuple) and halting[0] > 100 * even[0]
    one_of_two = tiny(model__layers=4, data__accumulate=4, workers=2, pipeline__stages=2, pipeline__workers=[1])
    for step_s in (6.0, (6.0, 6.0)):
        steps = in_stages(replace(network, step_s=step_s), settings_of(one_of_two), LAYOUT)
        assert steps.network.step_s == (6.0, even[0])
        assert steps.computing == (1.0, pytest.approx(6.0 / 2 / even[0])), "a whole replica waits for no stage"


def test_a_boundary_that_remembers_is_priced_by_how_often_samples_come_again():
    network = Network(uplink_bps=1e9, downlink_bps=1e9, step_s=1.0, stages=StageLinks(bandwidth_bps=1e5))
    cut = {
        "model__layers": 4,
        "data__accumulate": 4,
        "pipeline__stages": 2,
        "pipeline__backward": "intk",
        "run__local_steps": 1,
    }

    def priced_s(steps: int, windows: int) -> float:
        """Of all steps of a run."""
        config = tiny(**cut, run__steps=steps, pipeline__forward="aqsgd", data__windows=windows)
        return steps * step_s_of(network, config)

    of_a_step = 4 * tiny(**cut).data.batch_size
    once = priced_s(10, 10 * of_a_step)
    assert once == pytest.approx(10 * step_s_of(network, tiny(**cut))), "first visits are sent whole"
    assert priced_s(10, 99 * of_a_step) == once
    twice, thrice = priced_s(20, 10 * of_a_step), priced_s(30, 10 * of_a_step)
    assert thrice - twice == pytest.approx(twice - once), "every epoch after the first takes as long"
    assert twice - once < 0.5 * once


def test_before_a_local_phase_the_embeddings_that_a_projection_loses_pass_through_all_stages_one_after_the_other(
    tmp_path,
):
    narrow = {"name": "projection", "width": 8}
    config = tiny(
        **{**FAR, "workers": 1, "pipeline__stages": 3, "pipeline__forward": narrow, "pipeline__backward": narrow}
    )
    simulate(config, tmp_path)
    phase, *_ = (line["boundary_bytes"] for line in read_metrics(tmp_path) if line["kind"] == "train")
    of_table = phase[0][0] - phase[0][1]  # all else of the forward direction is as much as that of the backward one
    network = Network(uplink_bps=1e9, downlink_bps=1e9, step_s=0.0, stages=StageLinks(bandwidth_bps=1e4, latency_s=0.5))
    work = read_pipeline(tmp_path)
    assert work is not None and work.pop("table_bytes") == of_table == 4 * 256 * 64
    assert step_s_of(network, config) - inner_steps(network, work, 1).network.step_s == pytest.approx(
        2 * (8 * of_table / 1e4 + 0.5) / config.run.local_steps
    )


def test_waits_between_stages_are_recorded_of_each_stage_and_count_as_no_computing(tmp_path, capsys):
    config = tiny(**FAR)
    simulate(config, tmp_path / "run")
    steps = in_stages(config.network["far"], settings_of(config), LAYOUT)
    assert steps.computing == (pytest.approx(2.0 / 2 / steps.network.step_s),) * 2 and steps.computing[0] < 0.1
    seconds, stages = read_seconds(tmp_path / "run"), [*read_stages(tmp_path / "run")]
    for one in seconds:
        assert one.compute_s == pytest.approx(2 * 2.0 / 2), (
            "each stage computes for half of the time of a whole replica"
        )
        assert one.compute_s + one.other_s == pytest.approx(2 * steps.network.step_s)
        own = [each for each in stages if (each.round, each.worker) == (one.round, one.worker)]
        assert sum(each.compute_s for each in own) == pytest.approx(2 * 2.0)
        assert all(each.compute_s + each.wait_s == pytest.approx(one.compute_s + one.other_s) for each in own)
    crossed = 2 * 4 * 4 * 2 * 16 * 64  # steps of a round, micro-batches, bytes of an element, B, S, D
    assert {(one.network, one.stage, one.forward_bytes, one.backward_bytes) for one in stages} == {
        ("far", 0, crossed, 0),
        ("far", 1, 0, crossed),
    }
    computing = sum(one.compute_s for one in seconds if one.worker == 0) / seconds[-1].end_s
    (tmp_path / "far.toml").write_text(to_toml(config.network["far"]))
    assert main(["price", str(tmp_path / "run"), str(tmp_path / "far.toml")]) == 0
    assert f"{computing:.1%} of it computing, " in capsys.readouterr().out


def test_a_report_and_an_outcome_price_a_run_in_stages_as_a_check_does(tmp_path):
    config, folder = tiny(**FAR, run__local_steps=2), tmp_path / "run"
    train_all(
        [Point("far", {}, 0, "far", config)],
        {"far": folder},
        tmp_path / "outcomes.jsonl",
        began=lambda run: None,
        on_end=lambda run, end: None,
    )
    (checked,), (outcome,) = examine_run(config).networks, read_results(tmp_path / "outcomes.jsonl")
    (row,) = summary_rows({"far": folder}, config.network)
    assert outcome.row["wall_s"] == row["wall_s"] and outcome.row["utilisation"] == row["utilisation"]
    assert row["wall_s"] == {"far": read_seconds(folder)[-1].end_s} == {"far": pytest.approx(2 * checked.round_s)}
    assert row["utilisation"] == {"far": pytest.approx(checked.utilisation)} and checked.utilisation < 0.1
    assert row["loss_at_s"]["far"][-1][0] == row["wall_s"]["far"]
    (folder / "seconds.jsonl").unlink()  # which a run under way does not have
    (shown,) = json.loads(LiveRuns([folder]).data(""))["runs"]
    assert shown["ends_s"] == row["wall_s"]


def test_a_run_in_stages_is_priced_on_any_network_by_its_folder_and_not_without_its_record(tmp_path, caplog):
    config, folder = tiny(**FAR, pipeline__workers=[1], pipeline__forward="aqsgd", data__windows=16), tmp_path / "run"
    simulate(config, folder)
    other = replace(config.network["far"], step_s=(3.0, 5.0), stages=StageLinks(latency_s=0.5, speeds=(1.0, 0.25)))
    expected = in_stages(other, settings_of(config), LAYOUT)
    assert inner_steps(other, read_pipeline(folder), 2) == expected
    (row,) = summary_rows({"run": folder}, {"other": other})
    assert row["wall_s"]["other"] == price(read_trace(folder), expected.network).total_s
    (folder / "pipeline.json").unlink()
    (row,) = summary_rows({"run": folder}, {"other": other})
    assert row["wall_s"] == row["utilisation"] == {} and "is a run in stages without pipeline.json" in caplog.text


def test_a_run_that_continues_in_one_piece_is_priced_as_one(tmp_path):
    simulate(tiny(**FAR, run__checkpoint_every=1), tmp_path)
    assert read_pipeline(tmp_path) is not None
    simulate(tiny(**{**FAR, "run__steps": 6, "pipeline__stages": 1}, run__checkpoint_every=1), tmp_path, resume=True)
    assert read_pipeline(tmp_path) is None


def test_a_report_and_a_price_say_that_all_rounds_have_the_last_stages_where_these_changed(tmp_path, capsys):
    folder, network = tmp_path / "run", tmp_path / "far.toml"
    simulate(tiny(**FAR, run__checkpoint_every=1), folder, until=1)
    simulate(tiny(**FAR, run__checkpoint_every=1, pipeline__cuts=[1]), folder, resume=True)
    words, network_of = "after round 1: pipeline.cuts from none to", tiny(**FAR).network["far"]
    network.write_text(to_toml(network_of))
    assert main(["price", str(folder), str(network), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["changed_stages"].startswith(words)
    assert main(["report", str(folder), "--out", str(tmp_path / "page.html")]) == 0
    sentence = f"the stages of tiny changed ({words}"
    assert sentence in capsys.readouterr().out and sentence in (tmp_path / "page.html").read_text()
    assert ", all in the last stages |" in (tmp_path / "page-table.md").read_text()
    assert main(["report", str(folder), "--out", str(tmp_path / "page.html"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["changed_stages"].startswith(words)
    (folder / "seconds.jsonl").unlink()  # which a run under way does not have
    assert any(
        f"the stages of run changed ({words}" in note for note in json.loads(LiveRuns([tmp_path]).data(""))["notes"]
    )
    write_branches(folder, [{"round": 1, "digest": "", "changes": {"pipeline.lost": [[], [{}]]}}])
    assert summary_rows({"tiny": folder}, {"far": network_of})[0]["changed_stages"] is None, "as they were"


@pytest.mark.parametrize("change", [{"shares": [1.0]}, {"again_bytes": []}, {"micro_batches": 10**6}])
def test_a_record_of_work_that_no_inner_step_has_is_refused(tmp_path, change):
    work = pipeline_work(settings_of(tiny(**FAR)), LAYOUT)
    assert work is not None
    write_pipeline(tmp_path, PipelineWork(**{**work, **change}))
    with pytest.raises(DataError, match=r"pipeline\.json has .*; repair or remove the file"):
        read_pipeline(tmp_path)


def test_a_check_says_which_share_of_a_round_stages_wait_for_each_other():
    examined = examine_run(tiny(**FAR))
    (network,) = examined.networks
    assert network.utilisation < 0.1 and network.utilisation + network.between_stages > 0.9
    sentence = f"{network.utilisation:.1%} of it computing, {network.between_stages:.1%} waiting between stages"
    assert any(line.endswith(sentence) for line in lines(examined))


def test_speeds_of_another_number_of_stages_are_refused():
    network = Network(uplink_bps=1e9, downlink_bps=1e9, step_s=1.0, stages=StageLinks(speeds=(1.0, 1.0, 1.0)))
    with pytest.raises(ConfigError, match=r"stages\.speeds lists 3 stages but pipeline\.stages is 2"):
        in_stages(network, settings_of(tiny(model__layers=4, data__accumulate=4, pipeline__stages=2)), LAYOUT)


def test_a_network_file_with_stages_is_written_as_it_is_read():
    text = to_toml(Network(uplink_bps=1e9, downlink_bps=1e9, stages=StageLinks(latency_s=0.5, speeds=(1.0, 2.0))))
    assert from_toml(text, "the file").stages == StageLinks(latency_s=0.5, speeds=(1.0, 2.0))
