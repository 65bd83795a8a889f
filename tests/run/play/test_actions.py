"""What a visitor may do, and what then holds."""

import pytest

from gossamer.errors import ConfigError
from gossamer.run.play.actions import (
    LOCAL_STEPS,
    METHODS,
    MOMENTA,
    WORKERS,
    Action,
    Conditions,
    action_of,
    conditions_after,
    describe,
)

EACH = [
    *(Action(do, i) for do in ("kill", "revive", "slow", "mend") for i in range(WORKERS)),
    Action("cut"),
    Action("heal"),
    *(Action("method", one) for one in METHODS),
    *(Action("local_steps", one) for one in LOCAL_STEPS),
    *(Action("momentum", one) for one in MOMENTA),
]


def test_every_action_is_made_again_from_its_list_and_has_a_sentence() -> None:
    for action in EACH:
        assert action_of(action.plain()) == action
        assert describe(action, Conditions()).endswith((".", "kept."))


@pytest.mark.parametrize("action", EACH, ids=str)
def test_an_action_sets_what_it_says_and_doing_it_twice_is_doing_it_once(action: Action) -> None:
    for before in (
        Conditions(),
        conditions_after(conditions_after(Conditions(), Action("kill", 1)), Action("method", "gasloc")),
    ):
        after = conditions_after(before, action)
        assert conditions_after(after, action) == after
        changed = {key for key, value in after._asdict().items() if value != getattr(before, key)}
        kinds = {"kill": "alive", "revive": "alive", "slow": "slow", "mend": "slow", "cut": "cut", "heal": "cut"}
        assert changed <= {kinds.get(action.do, action.do), "momenta"}
        match action:
            case Action("kill" | "revive" as do, worker):
                assert (worker in after.alive) == (do == "revive")
            case Action("slow" | "mend" as do, worker):
                assert (worker in after.slow) == (do == "slow")
            case Action("cut" | "heal" as do):
                assert after.cut == (do == "cut")
            case Action(do, value):
                assert getattr(after, do) == value or METHODS[after.method][1] is None


def test_each_method_keeps_its_own_momentum() -> None:
    conditions = conditions_after(conditions_after(Conditions(), Action("momentum", 0.9)), Action("method", "gasloc"))
    assert conditions.momentum == METHODS["gasloc"][1]
    assert conditions_after(conditions, Action("method", "gossip")).momentum is None
    assert conditions_after(conditions, Action("method", "diloco")).momentum == 0.9


def test_a_mean_is_taken_by_more_than_half_of_all_slots_and_gossip_continues_on_both_sides() -> None:
    cut = conditions_after(Conditions(), Action("cut"))
    assert cut.taking_part() == {0, 1, 2, 3, 4} and cut.side_of(6) == {5, 6, 7}
    assert conditions_after(cut, Action("kill", 0)).taking_part() == frozenset(), "four of eight are not more than half"
    assert conditions_after(cut, Action("method", "gossip")).taking_part() == cut.alive
    assert conditions_after(cut, Action("kill", 6)).side_of(7) == {5, 7}


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (["kill", WORKERS], "name one of 0 to 7"),
        (["kill", -1], "name one of 0 to 7"),
        (["kill", True], "is no action"),
        (["kill"], "is no action"),
        (["kill", "3"], "is no action"),
        (["cut", 1], "is no action"),
        (["kil", 3], "kill"),
        (["method", "adam"], "give one of diloco, gossip, gasloc"),
        (["local_steps", 7], "give one of 1, 2"),
        (["local_steps", 10**400], "give one of 1, 2"),
        (["momentum", 1.0], "give one of 0.0"),
        ({}, "is no action"),
        (["momentum", float("nan")], "give one of 0.0"),
        (["local_steps", True], "is no action"),
        ([], "is no action"),
        (["method", ["gossip"]], "is no action"),
        ("kill", "is no action"),
        ([[]], "is no action"),
        (None, "is no action"),
    ],
)
def test_what_is_no_action_is_refused_in_a_sentence(raw: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        action_of(raw)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
