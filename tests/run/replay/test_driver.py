"""The driver of replays: in every order of actors each event has its inputs, and an actor that can never continue is named."""

from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.errors import DataError
from gossamer.run.replay.driver import Actor, Contradiction, Missing, follow


class Sums(Actor):
    """Its events are the numbers of messages of others, `(actor, number)`: it adds them up, and publishes the sum as its next."""

    def __init__(self, key, events, sent):
        super().__init__(key, f"worker {key}", Path(f"log-{key}"), events)
        self.sent, self.sum, self.taken = sent, key + 1, 0

    def named(self, event):
        return f"event {self.taken}"

    def missing(self, event):
        if event == "nonsense":
            raise Contradiction("it is no event")
        lacks = next((one for one in event if one not in self.sent), None)
        return None if lacks is None else Missing(f"it needs message {lacks[1]} of worker {lacks[0]}", lacks[0])

    def take(self, event):
        self.sum = (3 * self.sum + sum(self.sent[one] for one in event)) % 1_000_003
        self.sent[self.key, self.taken] = self.sum
        self.taken += 1


@given(seed=st.integers(0, 1 << 30), n=st.integers(1, 5), length=st.integers(0, 40))
def test_numbers_do_not_depend_on_which_actor_comes_first(seed, n, length):
    random, events, made = Random(seed), {i: [] for i in range(n)}, []
    for _ in range(length):  # as they happened, each needs some of what was there
        i = random.randrange(n)
        made.append((i, len(events[i])))
        events[i].append(random.sample(made[:-1], min(2, len(made) - 1)))
    found = []
    for _ in range(3):
        sent = {}
        actors = [Sums(i, events[i], sent) for i in random.sample(range(n), n)]
        assert len([*follow(actors)]) == length
        found.append(sent)
    assert found[0] == found[1] == found[2]


def test_of_those_that_wait_for_each_other_the_last_is_named_with_its_file():
    sent = {}
    actors = [Sums(0, [[], [(1, 1)]], sent), Sums(1, [[], [(2, 1)]], sent), Sums(2, [[], [(3, 0)]], sent)]
    taken = []
    with pytest.raises(
        DataError, match=r"'log-2' contradicts itself at worker 2 in event 1: it needs message 0 of worker 3"
    ):
        taken.extend(follow(actors))
    assert sent.keys() == {(0, 0), (1, 0), (2, 0)}
    circle = [Sums(0, [[(1, 0)]], sent := {}), Sums(1, [[(0, 0)]], sent)]
    with pytest.raises(
        DataError, match=r"'log-1' contradicts itself at worker 1 in event 0: it needs message 0 of worker 0"
    ):
        [*follow(circle)]


def test_an_event_that_cannot_be_is_named_once_it_is_the_next():
    sent = {}
    with pytest.raises(DataError, match=r"'log-0' contradicts itself at worker 0 in event 1: it is no event; restore"):
        [*follow([Sums(0, [[], "nonsense"], sent)])]
    assert len(sent) == 1
