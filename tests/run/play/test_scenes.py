"""Rounds of a film: each action does what it says, and the same actions make the same film."""

import copy
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer.errors import TrainingError
from gossamer.network.links import Network
from gossamer.network.pricing import price
from gossamer.run.config.run_file import parse
from gossamer.run.play.actions import METHODS, WORKERS, Action, Conditions, action_of, conditions_after
from gossamer.run.play.film import Film, Frame, film_lines
from gossamer.run.play.live import filmed, one_thread
from gossamer.run.play.scenes import Scene, Studio, first_scene, next_scene, run_of, studio_of
from gossamer.run.simulated.simulate import simulate
from gossamer.settings.schema import parse_toml
from gossamer.tree import leaves

SHORT = Action("local_steps", 1)
EVERYONE = tuple(range(WORKERS))


@pytest.fixture(scope="module")
def studio() -> Iterator[Studio]:
    with one_thread() as each:
        yield studio_of(0, each)


def played(studio: Studio, scene: Scene, *rounds: Sequence[Action]) -> tuple[Scene, list[Frame]]:
    frames = []
    for actions in rounds:
        scene, frame = next_scene(studio, scene, actions)
        frames.append(frame)
    return scene, frames


def begun(studio: Studio, method: str, rounds: int = 2) -> Scene:
    """A film in which this method has trained some short rounds."""
    return played(studio, first_scene(studio), [SHORT, Action("method", method)], *[[]] * (rounds - 1))[0]


def same(one: Scene, other: Scene) -> bool:
    """Whether two scenes agree to the last bit."""
    plain = ("round", "conditions", "clock_s", "newest", "places")
    states = zip(one.states, other.states, strict=True)
    return all(getattr(one, name) == getattr(other, name) for name in plain) and all(
        a["steps_taken"] == b["steps_taken"]
        and all(torch.equal(x, y) for x, y in zip(tensors(a), tensors(b), strict=True))
        for a, b in states
    )


def tensors(state: dict[str, Any]) -> list[torch.Tensor]:
    inner = [one for own in state["inner"]["state"].values() for one in own.values()]
    return [state["x"], *leaves(tuple(state["outer"])), *inner]


SCRIPT = [
    [["local_steps", 1]],
    [["slow", 7]],
    [["method", "gasloc"]],
    [["kill", 3], ["momentum", 0.5]],
    [["cut"]],
    [],
    [["revive", 3], ["kill", 6]],
    [["method", "diloco"]],
    [["revive", 6], ["heal"]],
    [["mend", 7], ["method", "gossip"]],
    [],
]


@pytest.mark.full
def test_the_same_seed_and_actions_give_the_same_film_and_another_seed_another() -> None:
    actions = [[action_of(one) for one in some] for some in SCRIPT]

    def made(seed: int, script: Sequence[Sequence[Action]]) -> bytes:
        film = [*filmed(seed, script)]
        return film_lines(Film(film[0][0], [frame for _, frame in film]))

    once = made(0, actions)
    assert once == made(0, actions)
    assert once.splitlines()[1] != made(1, actions[:1]).splitlines()[1]
    assert len(once) / len(actions) < 1100, "a film of two minutes stands on the site"


@pytest.mark.full
def test_a_round_is_a_function_of_its_scene_which_it_does_not_change(studio: Studio) -> None:
    for method in METHODS:
        scene = begun(studio, method)
        kept = copy.deepcopy(scene)
        actions = [Action("kill", 2), Action("cut"), Action("momentum", 0.25)]
        (one, frame), (other, again) = (next_scene(studio, scene, actions) for _ in range(2))
        assert frame == again and same(one, other) and same(scene, kept) and not same(one, scene)


def test_any_actions_in_any_order_keep_a_film_going(studio: Studio) -> None:
    draws = random.Random(1)
    scene = begun(studio, "gasloc", 1)
    kinds = ("kill", "kill", "revive", "slow", "mend", "cut", "heal", "method")
    for _ in range(15):
        some = [draws.choice(kinds) for _ in range(draws.randrange(4))]
        actions = [
            Action(
                do,
                None if do in ("cut", "heal") else draws.choice([*METHODS]) if do == "method" else draws.randrange(8),
            )
            for do in some
        ]
        before, (scene, frame) = scene, next_scene(studio, scene, actions)
        assert {*frame["there"]} <= {*frame["alive"]} and frame["clock_s"] >= max(before.clock_s)
        assert all((one is None) == (i not in frame["alive"]) for i, one in enumerate(frame["seconds"]))
        assert all(after >= ago for after, ago in zip(scene.clock_s, before.clock_s, strict=True))
        if frame["method"] == "diloco" and frame["there"]:
            assert frame["disagreement"] == 0.0 and frame["mean"] == frame["there"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("method", METHODS)
def test_what_is_played_without_a_hand_is_what_is_simulated(studio: Studio, method: str, tmp_path: Path) -> None:
    conditions = conditions_after(conditions_after(Conditions(), Action("method", method)), SHORT)
    _, frames = played(studio, first_scene(studio), [SHORT, Action("method", method)], [], [])
    document = parse_toml(run_of(0, conditions).document, "the run")
    document["run"]["eval_every"] = 1
    run = simulate(parse(document), tmp_path / "run", until=3)
    assert [frame["loss"] for frame in frames] == pytest.approx(run.validation["loss"][1:], abs=1e-4)
    assert [frame["disagreement"] for frame in frames] == pytest.approx(run.validation["disagreement"][1:], rel=1e-3)
    still = Network(uplink_bps=4e6, downlink_bps=4e6, latency_s=0.02, step_s=0.1, jitter=0.1)
    assert frames[-1]["clock_s"] == pytest.approx(price(run.trace, still).total_s, rel=1e-4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("method", METHODS)
def test_a_dead_worker_takes_no_part_until_it_is_back_with_the_state_of_another(studio: Studio, method: str) -> None:
    before = begun(studio, method)
    scene, frames = played(studio, before, [Action("kill", 3)], [], [])
    for frame in frames:
        assert 3 not in {*frame["alive"], *frame["there"], *frame["mean"], *sum(frame["pairs"], ())}
        assert frame["seconds"][3] is None and frame["losses"][3] is None
    assert torch.equal(scene.states[3]["x"], before.states[3]["x"]) and scene.clock_s[3] == before.clock_s[3]
    after, (frame,) = played(studio, scene, [Action("revive", 3)])
    assert 3 in frame["there"] and after.states[3]["steps_taken"] == after.states[0]["steps_taken"]
    assert frame["seconds"][3] is not None and frame["seconds"][3][0] >= scene.clock_s[0] - 0.001, "it comes back today"
    if method == "diloco":
        assert torch.equal(after.states[3]["x"], after.states[0]["x"])


@pytest.mark.full
@pytest.mark.parametrize("method", ["gossip", "gasloc"])
def test_a_cut_separates_pairs_and_both_sides_of_gossip_continue(studio: Studio, method: str) -> None:
    _, frames = played(studio, begun(studio, method, 1), [Action("cut")], *[[]] * 3, [Action("heal")], *[[]] * 2)
    crossing = [[pair for pair in frame["pairs"] if (pair[0] < 5) != (pair[1] < 5)] for frame in frames]
    assert not any(crossing[:4]) and any(crossing[4:])
    assert all(frame["there"] == EVERYONE for frame in frames)
    assert {i for frame in frames[:4] for pair in frame["pairs"] for i in pair} >= {5, 6, 7}


def test_a_side_without_more_than_half_waits_for_its_mean_and_then_takes_the_state_of_the_others(
    studio: Studio,
) -> None:
    before = begun(studio, "diloco")
    scene, frames = played(studio, before, [Action("cut")], [])
    assert all(frame["there"] == frame["mean"] == (0, 1, 2, 3, 4) for frame in frames)
    assert torch.equal(scene.states[6]["x"], before.states[6]["x"])
    waited = frames[-1]["seconds"][6]
    assert waited is not None and waited[1] == 0.0 and waited[2] > 0.0, "it waits, and does not compute"
    after, (frame,) = played(studio, scene, [Action("heal")])
    assert frame["mean"] == EVERYONE and torch.equal(after.states[6]["x"], after.states[0]["x"])
    scene, (frame,) = played(studio, scene, [Action("kill", 0)])
    assert frame["there"] == () and frame["loss"] is None and "more than half" in frame["says"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("method", METHODS)
def test_a_slow_uplink_costs_priced_seconds_and_changes_no_number_of_the_training(studio: Studio, method: str) -> None:
    scene = begun(studio, method)
    (fast, (calm,)), (slow, (held,)) = (played(studio, scene, some) for some in ([], [Action("slow", 7)]))
    assert held["clock_s"] > calm["clock_s"] + 2.0
    assert all(torch.equal(a["x"], b["x"]) for a, b in zip(fast.states, slow.states, strict=True))
    assert held["losses"] == calm["losses"]
    _, (mended,) = played(studio, slow, [Action("mend", 7)])
    assert mended["clock_s"] - held["clock_s"] < held["clock_s"] - max(scene.clock_s)


@pytest.mark.full
def test_a_switch_keeps_the_parameters_and_resets_the_outer_state(studio: Studio) -> None:
    """GASLoC without momentum has no other memory than its parameters, and then it is gossip."""
    plain, _ = played(studio, begun(studio, "gasloc"), [Action("momentum", 0.0)], [])
    (one, (stayed,)), (other, (switched,)) = (
        played(studio, plain, some) for some in ([], [Action("method", "gossip")])
    )
    assert stayed["losses"] == switched["losses"] and stayed["pairs"] == switched["pairs"]
    assert all(torch.equal(a["x"], b["x"]) for a, b in zip(one.states, other.states, strict=True)), (
        "it starts from there"
    )
    there_and_back = [Action("method", "gossip"), Action("method", "gasloc")]
    again, _ = played(studio, plain, there_and_back)
    assert same(again, one), "there was nothing to forget"
    fast, _ = played(studio, plain, [Action("momentum", 0.8)], [])
    assert not same(played(studio, fast, there_and_back)[0], played(studio, fast, [])[0]), "the momentum is forgotten"


def test_diloco_begins_at_the_mean_of_its_workers_as_they_must_begin_alike(studio: Studio) -> None:
    scene = begun(studio, "gossip")
    assert not torch.equal(scene.states[0]["x"], scene.states[1]["x"])
    after, (frame,) = played(studio, scene, [Action("method", "diloco")])
    assert frame["disagreement"] == 0.0
    mean, reached = torch.stack([state["x"] for state in scene.states]).mean(0), after.states[0]["x"]
    assert (reached - mean).norm() < 10 * (scene.states[0]["x"] - mean).norm(), "one round away from it"
    assert torch.equal(after.states[7]["x"], reached)


@pytest.mark.full
def test_local_steps_and_momentum_change_and_all_states_are_kept(studio: Studio) -> None:
    for method in ("diloco", "gasloc"):
        scene = begun(studio, method)
        longer, (frame,) = played(studio, scene, [Action("local_steps", 2)])
        assert frame["local_steps"] == 2
        assert longer.states[0]["steps_taken"] == scene.states[0]["steps_taken"] + 2
        compute_s = [one[1] for one in frame["seconds"] if one is not None]
        assert min(compute_s) > 0.1, "two inner steps of 0.1 s, more or less"
        quick, _ = played(studio, scene, [Action("momentum", 0.9)])
        assert not same(quick, played(studio, scene, [])[0])
        there_and_back = [Action("momentum", 0.9), Action("momentum", METHODS[method][1])]
        assert same(played(studio, scene, there_and_back)[0], played(studio, scene, [])[0])


def test_when_no_worker_is_alive_nothing_happens_and_one_that_comes_back_continues_from_its_own_state(
    studio: Studio,
) -> None:
    scene = begun(studio, "gossip")
    dead, (frame,) = played(studio, scene, [Action("kill", i) for i in EVERYONE])
    assert frame["there"] == () and frame["says"].startswith("Nobody is alive")
    back, (frame,) = played(studio, dead, [Action("revive", 5)])
    assert frame["there"] == (5,) and back.states[5]["steps_taken"] == scene.states[5]["steps_taken"] + 1


def test_a_film_that_diverges_says_so(studio: Studio) -> None:
    scene = begun(studio, "gossip", 1)
    x = scene.states[2]["x"].clone()
    x[0] = float("nan")
    spoilt = scene._replace(states=tuple({**s, "x": x} if i == 2 else s for i, s in enumerate(scene.states)))
    with pytest.raises(TrainingError, match="worker 2"):
        next_scene(studio, spoilt, [])
