"""A live film: a thread trains round after round for a page, whose visitor acts between rounds."""

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from gossamer.errors import ConfigError, DataError, GossamerError, TrainingError
from gossamer.record.jsonl import short
from gossamer.run.play.actions import Action, Conditions, action_of, conditions_after
from gossamer.run.play.film import MOST_ROUNDS, TEMPO, Film, Frame, Head, film_contents, film_lines

if TYPE_CHECKING:
    from gossamer.rounds.exchange import Each

_UNSEEN_S = 15.0
"""How long it keeps training without requests from a page."""
SPEEDS = (0.5, 1.0, 2.0, 4.0)
_MOST_QUEUED = 64


class Live:
    """A film in production until it is closed; thread-safe.

    Only the thread uses the scene. Everything else is shared under one condition, which also wakes the thread.

    Args:
        seed: of the first film.
        playing: whether it trains before the first request.
    """

    def __init__(self, seed: int, *, playing: bool = True) -> None:
        self._changed = threading.Condition()
        self._seed, self._playing, self._speed, self._steps = seed, playing, 1.0, 0
        self._closed, self._seen_s = False, time.monotonic()
        self._begin()
        # One thread trains, and requests come from others, which never wait for a round.
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _begin(self) -> None:
        self._name = secrets.token_hex(8)
        self._head: Head | None = None
        self._frames: list[Frame] = []
        self._queue: list[Action] = []
        self._settings = Conditions()
        """With what is queued."""
        self._problem = ""
        self._warnings: tuple[str, ...] = ()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A context in which it trains."""
        self._thread.start()
        try:
            yield
        finally:
            with self._changed:
                self._closed = True
                self._changed.notify_all()
            self._thread.join()

    @property
    def film(self) -> Film | None:
        """The film so far; None before the first round."""
        with self._changed:
            return None if self._head is None or not self._frames else Film(self._head, [*self._frames])

    def lines(self) -> bytes:
        """The film as a file has it; empty before the first round."""
        film = self.film
        return b"" if film is None else film_lines(film)

    def data(self, name: str, have: int) -> bytes:
        """The frames after the first `have` of the film of this name, as JSON."""
        with self._changed:
            self._seen_s = time.monotonic()
            self._changed.notify_all()
            conditions = self._settings
            now: dict[str, Any] = {
                "film": self._name,
                "playing": self._playing,
                "speed": self._speed,
                "speeds": SPEEDS,
                "problem": self._problem,
                "warnings": self._warnings,
                "seed": self._seed,
                "conditions": {
                    "method": conditions.method,
                    "local_steps": conditions.local_steps,
                    "momentum": conditions.momentum,
                    "alive": sorted(conditions.alive),
                    "slow": sorted(conditions.slow),
                    "cut": conditions.cut,
                },
            }
            if self._head is not None and name != self._name:
                now["contents"] = film_contents(self._head, self._frames, live=True)
            elif name == self._name:
                now["frames"] = self._frames[max(0, have) :]
        return json.dumps(now, allow_nan=False).encode()

    def act(self, body: bytes) -> bytes:
        """Executes a page's request: `{"actions": [...]}`, `{"playing": true}`, `{"speed": 2}`, `{"step": true}`, or
        `{"again": SEED}`, which begins a new film. Raises: ConfigError for anything else."""
        asked = _requested(body)
        with self._changed:
            self._seen_s = time.monotonic()
            match asked:
                case {"actions": list(raw), **rest} if not rest:
                    actions = [action_of(one) for one in raw]
                    if len(self._queue) + len(actions) > _MOST_QUEUED:
                        raise ConfigError(f"more than {_MOST_QUEUED} actions wait for the next round; wait for it too")
                    for action in actions:
                        self._settings = conditions_after(self._settings, action)
                    self._queue += actions
                case {"playing": bool(playing), **rest} if not rest:
                    self._playing = playing
                case {"step": True, **rest} if not rest:
                    self._steps = 1
                case {"speed": int() | float() as speed, **rest} if not rest and speed in SPEEDS:
                    self._speed = float(speed)
                case {"again": int(seed), **rest} if not rest and type(seed) is int and 0 <= seed < 2**31:
                    self._seed, self._playing = seed, True
                    self._begin()
                case _:
                    raise ConfigError(
                        f"{short(asked)} cannot be asked for; send actions, playing, step, speed or again"
                    )
            self._changed.notify_all()
        return b"{}"

    def _run(self) -> None:
        with one_thread() as each:
            while (name := self._name) and not self._closed:
                try:
                    self._shoot(name, each)
                except GossamerError as error:  # a diverged film, or unreadable text
                    with self._changed:
                        if name == self._name:
                            self._problem = _error_sentence(error)
                        self._changed.wait_for(lambda name=name: self._closed or name != self._name)

    def _shoot(self, name: str, each: "Each") -> None:
        """Trains the film of this name until another one begins, or all ends."""
        from gossamer.run.play.scenes import first_scene, head_of, next_scene, run_of, studio_of

        studio = studio_of(self._seed, each)
        scene, due_s = first_scene(studio), time.monotonic()
        head = head_of(studio)
        with self._changed:
            if name != self._name:
                return
            self._head = head
        while True:
            with self._changed:
                while not self._closed and name == self._name and not self._may_train(due_s):
                    self._changed.wait(self._pause_s(due_s))
                if self._closed or name != self._name:
                    return
                actions, self._queue, self._steps = self._queue, [], 0
                speed = self._speed
            begun_s = time.monotonic()
            scene, frame = next_scene(studio, scene, actions)
            warnings = run_of(studio.seed, scene.conditions).warnings
            with self._changed:
                if name == self._name:
                    before_s = self._frames[-1]["clock_s"] if self._frames else 0.0
                    self._frames.append(frame)
                    self._warnings = warnings
                    due_s = begun_s + TEMPO.shown_s(frame["clock_s"] - before_s) / speed
                    if len(self._frames) >= MOST_ROUNDS:
                        raise DataError(f"the film has {MOST_ROUNDS:,} rounds, and no more fit; begin a new one")

    def _may_train(self, due_s: float) -> bool:
        """Whether the next round is due; a visitor's actions are processed at once."""
        now_s = time.monotonic()
        if self._steps:
            return True
        if not self._playing or now_s - self._seen_s > _UNSEEN_S:
            return False
        return now_s >= due_s or bool(self._queue)

    def _pause_s(self, due_s: float) -> float:
        """How long the thread may sleep before its next check."""
        left_s = due_s - time.monotonic()
        return min(left_s, 1.0) if left_s > 0 else 1.0


def filmed(seed: int, actions: Sequence[Sequence[Action]]) -> Iterator[tuple[Head, Frame]]:
    """Trains a round for each list of actions, and yields the frames.

    Raises: DataError, TrainingError.
    """
    from gossamer.run.play.scenes import first_scene, head_of, next_scene, studio_of

    with one_thread() as each:
        studio = studio_of(seed, each)
        scene, head = first_scene(studio), head_of(studio)
        for some in actions:
            scene, frame = next_scene(studio, scene, some)
            yield head, frame


@contextlib.contextmanager
def one_thread() -> Iterator["Each"]:
    """A context in which torch uses one thread, so that sums have the same order on every machine; yields a map over workers."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield lambda function, items: [function(item) for item in items]
    finally:
        torch.set_num_threads(before)


def _requested(body: bytes) -> object:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise ConfigError(f"{short(body)} is not JSON; send an object") from None


def _error_sentence(error: GossamerError) -> str:
    """The error sentence for the visitor."""
    if isinstance(error, TrainingError):
        return f"It has diverged: {error}."
    return str(error)
