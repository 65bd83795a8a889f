"""The outer loop around a user's training loop."""

import contextlib
import json
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from pydantic import Field
from torch import nn

from gossamer import rng
from gossamer.codecs import Codec
from gossamer.errors import CheckpointError, ConfigError, PeerError
from gossamer.library.dtensors import local, mesh_of, reshard
from gossamer.library.flat import flat_of, layouts_with_wrappers, must_carry_copies, with_bare_names
from gossamer.library.guard import Rest, must_be_trainable, must_hold, must_not_be_wrapped, rest_of, take_hold
from gossamer.library.in_store import LoopInStore, join_store
from gossamer.library.lane import Lane, at_board, join_sites, lane_in, lane_of_site, warn_between_machines
from gossamer.library.metrics import Meter, OuterMetrics
from gossamer.library.parts import (
    OuterMethod,
    OuterOptions,
    Reduction,
    apart,
    keys_in_store,
    keys_of_sites,
    must_be_a_site,
    must_be_in_a_store,
    must_be_what_is_asked,
    naming_unknown_arguments,
    ranks_of,
    settled_parts,
    timetable_in,
)
from gossamer.library.peers import Common, Peers, common_of, describe_model
from gossamer.library.recording import Recorder, Recording, run_toml
from gossamer.library.saved import FORMAT, OuterState, must_continue_alike, require_matching_state, what_it_is_of
from gossamer.library.siblings import Siblings
from gossamer.library.sites import REJOIN_ROUNDS, ElasticSite, elastic_site
from gossamer.library.watch import LoopCheck, explained, waiting_for
from gossamer.rounds.compatibility.combination import Combination
from gossamer.rounds.compatibility.combine import Method, method_of, settled_rule, warnings_of
from gossamer.rounds.loop import EVERYONE, InFlight, OuterLoop
from gossamer.rounds.mean_model import mean_over_workers
from gossamer.rounds.schedule import Schedule, Stop
from gossamer.rules import Rule
from gossamer.settings.fields import FolderName
from gossamer.settings.options import Count, Number, check_option
from gossamer.settings.over_time import Timetable, timetable_of
from gossamer.topologies import Topology
from gossamer.transport.elastic.closing import LeftOutError
from gossamer.tree import leaves, must_fit

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger("gossamer")
M = TypeVar("M", bound=nn.Module)
_PATIENCE_S = 10.0
"""Seconds that `mean_model` waits before it names the workers that have not entered it."""


class Outer(Generic[M]):
    """The outer loop around a training loop: counts inner steps, and exchanges with the peers after every `local_steps` of them.

        outer = gossamer.Outer(model, gossamer.gasloc(), local_steps=30)      # in a script that torchrun starts
        for batch in data:
            loss = model(batch); loss.backward(); optimizer.step(); optimizer.zero_grad()
            outer.step()
        with outer.mean_model() as mean:                                      # entered by all workers
            if outer.worker == 0: mean.save_pretrained("trained")
        outer.close()

    Args:
        model: its trainable parameters become views of one flat buffer; optimizers made before or after keep working. All
            workers start from the parameters of worker 0. No DistributedDataParallel may be around it.
        rule: a name from `RULES`, a `Rule`, or what `gossamer.method` returns for the name of a method, which also sets the
            topology, codec, schedule and local steps that are not given here. A rule on gradients is refused.
        topology: a name from `TOPOLOGIES`, or a `Topology`; by default random pairs, or the topology that the rule requires:
            the complete graph, a ring, a tree, random pushes.
        local_steps: inner steps of a round, by default 30; workers may differ where the schedule has no overlap. A mapping
            has them by inner step, and what is in force at the begin of a round counts for all of it: `{0: 1, 2000: 30}`.
        seed: of topologies and codecs that draw, and of `drawing`.
        codec: a name from `CODECS`, or a `Codec`; by default nothing is lost.
        schedule: exchange in several fragments, and overlap with training; by default neither.
        reduction: how a mean over all workers is computed: "ordered" sums it in worker order, bitwise as in a simulation, and
            with errors that name the worker that fails; "all_reduce" is the backend's own, whose last bits differ. It needs a
            rule such as `diloco`, which takes such a mean, without codec and without overlap.
        timeout_s: how long an exchange waits for a peer.
        compile: one pass over the memory for the outer update; needs a C++ compiler, and changes no bit.
        process_group: its members are the workers, in the order of their ranks; the default group when None. It may be made
            with any backend string that has gloo for the CPU, or with NCCL alone, which was never run. Connections are
            Outer's own. Without any group the workers are the processes that a launcher such as torchrun counts in WORLD_SIZE
            (those of mpirun and srun call `gossamer.integrations.as_worker()` first); they meet at its MASTER_ADDR over gloo, and
            no group is made, so that the script may make one later.
        rest: what is done at the start with frozen parameters and buffers, which are never exchanged: "compare" refuses
            workers that differ, "broadcast" takes those of worker 0, "own" leaves them.
        mesh: the processes of one worker that hold its model together, as FSDP2, HSDP or tensor parallelism leave it; by default
            the mesh of its parameters. All workers have equal meshes. Process s of a worker exchanges its shard with process s
            of its peers, and all processes of a worker take an update or none does. A codec sees one shard at a time.
        site: the number of this worker and how many there are, `(0, 3)`, where each is its own world, as one `torchrun`
            starts it, or a process without one. All processes of its default group are the worker.
        join: HOST:PORT where the sites meet; the first process of site 0 listens there. GOSSAMER_SECRET, the same on all,
            authenticates the messages there, and encrypts nothing; `peers` does.
        elastic: whether sites may die, leave and come back while the others continue; otherwise the loss of one ends all. A site
            that comes back, started as before, takes the parameters and the outer state of another in its first `step`, all its
            processes after the same round; the inner step before that is lost, and its inner optimizer is its own. `rounds` is
            that of the run, and skips those that were missed. A mean over everyone, as of `diloco`, needs more than half of all
            sites, and waits for them. Each process keeps a copy of parameters and outer state in host memory for the others.
        peers: a TOML file with the tables [peers.NAME] that `gossamer keys show` prints, one for each site in the order of their
            numbers. All connections between sites, those to the place where they meet too, are then TLS 1.3 with a key of
            this machine (GOSSAMER_KEY, or the one of `gossamer keys` that is listed). In a store everything is then encrypted
            and signed.
        store: a folder or an object store such as s3://bucket/run in which the whole state lies: parameters and outer state. The
            same call starts the loop, joins it, or continues it after all processes were killed, with the parameters of the
            store; `rounds` then is that of the store. Its lease is renewed by a thread, also during training. One whose round
            was closed without it, `timeout_s` after it was expected, continues from its own last round and the means since; its
            local phase does not count. `close` frees the slot; the state stays. A worker is one process, which keeps a copy of
            parameters and outer state in host memory.
        workers: the number of slots in the store: processes that may take part at the same time. A process that starts takes
            the first free one, which `worker` is.
    Raises: ConfigError and PairingError for what cannot work, such as WORLD_SIZE above 1 without RANK, MASTER_ADDR or
        MASTER_PORT; TransportError when the store of the processes cannot be reached; PeerError when workers do not come, or
        disagree on model, rule, topology, codec or another of these, with what each has; or a store has no free slot.
    Cost: the rule's state, one message, and those received from the peers; the exchange blocks, and its receives are posted a
        whole local phase before. At the start a hash of all frozen numbers (1 GB/s), and until the first exchange two checksums
        of the parameters. Buffers such as batch-norm statistics stay each worker's own after the start. Parameters in bf16 or
        fp16 are sent as such and have an outer state in fp32: twice the bytes for the rule's copies, and one fp32 copy of the
        parameters more where the rule does not keep the start of the round (as `gossip` and `local_sgd`).
        With 8 workers on one machine of 2 cores, the ordered mean took 4 times as long as the all-reduce with 4,000 to 160,000
        parameters, where messages are many and small, and 1.5 times with a million.

    Gradient accumulation: call `step` after `optimizer.step()`, not after each micro-batch; a round is `local_steps` optimizer
    steps. Mixed precision: call `step` after every `scaler.step(optimizer)`, also where the scaler skipped it, since all
    workers must call `step` equally often, and which steps are skipped differs between them. A warning names a first call of
    `step` after a backward pass and before an optimizer step, and a first exchange before which nothing has changed the
    parameters: `step` is called too early or too often, or the optimizer has other parameters.

    Parameters that `load_state_dict(assign=True)` has replaced are taken back into the flat buffer at the next exchange. A
    model that was converted, moved or resized, or of which more became trainable, is refused there in a sentence.

    Without a launcher there is one worker, and the rule is its limit for one: an outer momentum, or nothing.

    >>> import gossamer, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> outer = gossamer.Outer(model, gossamer.gasloc(lr=0.5, momentum=0.0), local_steps=1)
    >>> before = model.weight.detach().clone()
    >>> with torch.no_grad(): _ = model.weight.add_(1.0)
    >>> outer.step()
    True
    >>> bool(torch.allclose(model.weight, before + 0.5))
    True
    """

    @naming_unknown_arguments
    def __init__(
        self,
        model: M,
        rule: str | Rule | OuterMethod,
        *,
        topology: str | Topology | None = None,
        local_steps: int | Mapping[int, int] | None = None,
        seed: int = 0,
        codec: str | Codec | None = None,
        schedule: Schedule | None = None,
        reduction: Reduction = "ordered",
        timeout_s: float = 300.0,
        compile: bool = False,
        process_group: dist.ProcessGroup | None = None,
        rest: Rest = "compare",
        mesh: "DeviceMesh | None" = None,
        site: tuple[int, int] | None = None,
        join: str | None = None,
        elastic: bool = False,
        peers: str | Path | None = None,
        store: str | Path | None = None,
        workers: int | None = None,
    ) -> None:
        must_be_trainable(model)
        must_be_what_is_asked(rule, local_steps, site, join, peers)
        _must_be_options(seed=seed, reduction=reduction, timeout_s=timeout_s, compile=compile, rest=rest)
        _must_be_options(elastic=elastic, peers=peers, store=store)
        timetable = None if local_steps is None else timetable_in(local_steps)
        reshard(model)
        mesh = mesh_of(model.named_parameters(), mesh)
        meeting = _MeetingPlace(site, join, elastic, process_group, peers, store, workers)
        meeting.check(reduction)
        self._lane = lane = meeting.lane_here(mesh, timeout_s)
        # With elastic sites the first process waits for other sites, and its siblings wait longer for it.
        self._siblings = Siblings(lane, 3 * timeout_s if elastic else timeout_s)
        self.n, self.shard = lane.n, lane.shard
        facts = settled_parts(
            *(rule, topology, codec, schedule, timetable),
            reduction=reduction,
            n=lane.n,
            seed=seed,
            shards=lane.shards,
            elastic=elastic,
            store=store is not None,
        )
        self.method, self._timetable = _method_of(facts, compile=compile)
        self.seed, self.model, self._timeout_s = seed, model, timeout_s
        self.rounds: int = 0
        self.steps: int = 0
        self._flat = flat_of(model, mesh, self.method.schedule)
        must_carry_copies(self.method.codec, self._flat, lane.shards)
        self.layout, self.x = self._flat.layout, self._flat.x
        self._closed = self._left = self._mean_is_in = self._is_over = False
        self._failed: Exception | None = None
        self._takes_rest = rest == "broadcast"
        self._watched = True  # until the first round has ended, to notice a wrapper that is applied later
        self._meter, self._record = Meter(), Recorder()
        words = self._timetable.words
        common = common_of(self.method, self._flat, reduction=reduction, rest=rest, local_steps=words, seed=seed)
        self._site: ElasticSite | None = None
        self._store: LoopInStore | None = None
        self._peers, self._loop = self._meet(common, meeting) if store is None else self._enter(common, str(store))
        self.worker = self._lane.worker
        self._flat.write()
        self._is_of = what_it_is_of(common, self.method.rule, self._lane, local_steps=words)
        self._loaded: str | None = None
        # Whether all workers continue from the same state, which none of them can know by itself; a store has one state.
        self._agreed = store is not None
        self._stops: list[Stop] = []
        self._closed_with = list[InFlight]()
        """The exchanges that were in flight at `close`, for a state that is saved later, as where an error is handled."""
        self._check = LoopCheck(model, self.worker, self.n, self._flat.checksum, self.local_steps)
        self._watch = self._check.watch
        self._watch.exchanged = self.rounds > 0  # of a store
        self._forgotten = weakref.finalize(self, self._watch.forgotten)  # of an Outer that is dropped without close()
        take_hold(model, self._forgotten)
        self._means = 0
        """How often it has entered `mean_model`."""
        self.lr: Callable[[], float] | None = None
        """Returns the learning rate of the inner optimizer, where it is known, so that workers can compare theirs."""

    def _new_loop(self, peers: Peers) -> OuterLoop:
        loop = OuterLoop(
            self.method,
            peers.transport,
            [(self.x[a:b], self.layout.slice(a, b)) for a, b in self._flat.spans],
            local_steps=self.local_steps,
            timetable=self._timetable,
            seed=self.seed,
            reduce=peers.timed_reduce(self._reduced),
            membership=EVERYONE if self._site is None else self._site.membership,
            shard=self.shard,
            over_shards=self._siblings.total,
        )
        if self._site is not None:
            self._site.attach(loop)
        return loop

    def _meet(self, common: Common, meeting: "_MeetingPlace") -> tuple[Peers, OuterLoop]:
        """Connects to the other workers, and makes the outer state.

        In two phases, after each of which the processes of this worker agree whether all have succeeded: the second waits for
        messages that a process which failed in the first would never send.
        """
        with contextlib.ExitStack() as undo:  # also where another process of this worker has failed
            with self._siblings.all_or_none("the start of Outer"):
                if meeting.join is not None:
                    meet = at_board if meeting.elastic else join_sites
                    self._lane = meet(self._lane, meeting.join, self._timeout_s)
                    if self._lane.behind is not None:
                        undo.callback(self._lane.behind.close)
            with self._siblings.all_or_none("the start of Outer"):
                peers = self._connected(common, meeting)
                undo.callback(peers.close)
                loop = self._new_loop(peers)
            undo.pop_all()
            return peers, loop

    def _connected(self, common: Common, meeting: "_MeetingPlace") -> Peers:
        """The connections to the other workers, once this process has reached the board of the sites, if there is one."""
        join, timeout_s = meeting.join, self._timeout_s
        if meeting.elastic and join is not None:
            place, given = (self._lane, self._siblings, common, join), (self.x, rest_of(self.model), self.method)
            closings = sum(bool(stop.sends) for stop in self.method.schedule.stops(0, self.local_steps))
            self._site = elastic_site(*place, *given, closings=closings, timeout_s=timeout_s)
            lane = None if self._site.is_back else self._lane
            return Peers.of_site(self._site.transport, lane, self._site.start, timeout_s)
        if dist.is_initialized() or self._lane.joint is not None:
            group, rest = meeting.process_group, rest_of(self.model)
            return Peers.of(group, self._lane, common, self.x, rest, timeout_s=timeout_s)
        return Peers.none()

    def _enter(self, common: Common, url: str) -> tuple[Peers, OuterLoop]:
        """Takes a slot in the store, and the state that is there."""
        rest = partial(rest_of, self.model)
        where = url, self._lane.keys, self.n
        what = {"timetable": self._timetable, "seed": self.seed, "timeout_s": self._timeout_s}
        self._store = store = join_store(*where, common, self.method, self._flat, rest, **what)
        weakref.finalize(self, store.close)  # also when the process ends
        self._lane, self.rounds = self._lane._replace(worker=store.worker), store.round
        return Peers(store.connection, start=store.identity), store.loop

    def __repr__(self) -> str:
        """The method, the place of this worker and its progress.

        >>> import gossamer, torch
        >>> gossamer.Outer(torch.nn.Linear(2, 1), "gossip", local_steps=5)
        Outer(gossip() on random(peers=1), local_steps=5, worker=0 of 1, rounds=0, steps=0)
        """
        at = f"worker={self.worker} of {self.n}, rounds={self.rounds}, steps={self.steps}"
        shard = f"shard={self.shard} of {self._lane.shards}, " if self._lane.shards > 1 else ""
        codec = "" if self.method.codec.exact else f"codec={self.method.codec}, "
        given = {key: getattr(self.method.schedule, key) for key in ("fragments", "overlap_steps")}
        plan = "".join(f"{key}={n}, " for key, n in given.items() if n != getattr(Schedule(), key))
        parts = f"{self.method.rule} on {self.method.topology}, {codec}{plan}local_steps={self.local_steps}"
        return f"Outer({parts}, {shard}{at})"

    @property
    def steps_taken(self) -> int:
        """Inner steps of this worker since the start, including those before a resume."""
        return self._timetable.begin(self.rounds) + self.steps

    @property
    def local_steps(self) -> int:
        """Inner steps of the round that this worker is in."""
        return self._timetable.at(self.rounds).full_steps

    def drawing(self, batch: int | None = None, *, part: int | None = None) -> contextlib.AbstractContextManager[None]:
        """A context in which random numbers, such as those of dropout, are drawn by seed, worker and inner step.

            with outer.drawing():
                loss = model(batch)

        They do not depend on what was drawn before, so a resumed loop draws the same ones, and so does a simulation with the
        same seed. Put the forward pass inside, and nothing that shall continue the global random stream.

        Args:
            batch: the number of the batch since the start; by default `steps_taken`. With k micro-batches to a step, give
                `steps_taken * k + micro`.
            part: in a worker of several processes, the number of those that see the same samples: 0 for all where only tensor
                parallelism is, and the data-parallel rank in general; by default each process sees its own, as with FSDP2.
        Cost: some 20 µs; other threads that draw in such a context wait.

        >>> import gossamer, torch
        >>> outer = gossamer.Outer(torch.nn.Linear(2, 1), "gossip", seed=1)
        >>> with outer.drawing(): first = torch.rand(3)
        >>> with outer.drawing(): again = torch.rand(3)
        >>> bool(torch.equal(first, again))
        True
        """
        part = self.shard if part is None else part
        path = (self.worker, self.steps_taken if batch is None else batch, "model")
        return rng.drawing(self.x.device, self.seed, *path, *((part,) if part else ()))

    def record(self, folder: str | Path, *, steps: int, name: str = "", step_tokens: int = 0) -> None:
        """Records this worker's losses, messages and seconds from the next step on, for `gossamer status`, `watch` and `report`.

            outer.record("runs/mine", steps=5_000)        # on all workers, after a saved outer state was loaded
            ...
            outer.step(loss)

        Each worker has separate files in the folder, which all may share; status and pages show those on the machine where they
        are called. A loop that resumes from a saved outer state continues in the same folder, without the rounds after it. Of a
        worker of several processes the first one writes, and it counts its own bytes only.

        Args:
            steps: inner steps that this worker will take, against which pages show progress.
            name: of the run; by default that of the folder.
            step_tokens: tokens, or samples, of an inner step of this worker, for curves over them.
        Raises: ConfigError for fewer steps than a round has; at the next `step`, for a folder that holds another run.
        Cost: some 40 µs a round, and a line of metrics, seconds and trace each.

        >>> import gossamer, tempfile, torch
        >>> from gossamer.record.folder import read_metrics
        >>> folder = tempfile.mkdtemp()
        >>> with gossamer.Outer(torch.nn.Linear(2, 1), "gossip", local_steps=1) as outer:
        ...     outer.record(folder, steps=2)
        ...     rounds = [outer.step(loss) for loss in (0.5, 0.25)]
        >>> [line["loss"] for line in read_metrics(folder)]
        [0.5, 0.25]
        """
        self._must_be_open("record")
        for option, given, kind in (
            ("folder", folder, str | Path),
            ("steps", steps, Count),
            ("name", name := name or Path(str(folder)).resolve().name, FolderName),
            ("step_tokens", step_tokens, Number),
        ):
            check_option("record", option, given, kind)
        if self._record.folder is not None:
            raise ConfigError(
                f"record() got '{folder}', and this Outer records into '{self._record.folder}'; call it once"
            )
        text = run_toml(
            self.method,
            self._timetable,
            name=name,
            workers=self.n,
            steps=steps,
            seed=self.seed,
            model=type(self.model).__name__,
        )
        self._record = Recorder(Path(folder))
        if self.shard == 0:
            self._record = Recording(Path(folder), text, step_tokens, self.worker, self.method.sends_per_round)

    def log_validation(self, loss: float) -> None:
        """Records the validation loss of this worker's own model, after the last round that has ended; needs `record`."""
        self._must_be_open("log_validation")
        check_option("log_validation", "loss", loss, Annotated[float, Field(allow_inf_nan=True)])
        if self._record.folder is None:
            raise ConfigError(
                f"log_validation({loss}) was called without a record; call record(folder, steps=...) first"
            )
        self._record.open(self.rounds if self.steps_taken else None)
        self._record.validated(self.rounds - 1, self._timetable.begin(self.rounds), loss)

    @apart()
    def step(self, loss: float | torch.Tensor | None = None) -> bool:
        """Counts one inner step; and exchanges after every `local_steps` of them. Returns whether a round ended.

        Call it after `optimizer.step()`.

        Args: `loss` of this step goes into the record, if there is one; it is read when the round ends.
        Raises: PeerError naming the worker that failed first; ConfigError after `close`, for a wrapper that was put around the
            model, or when its parameters are not what they were.
        """
        self._must_be_open("step")
        if self._left:  # training continues after `finish`
            self._peers.publish("left", None)
            self._left = False
        is_back = self._store is not None or (self._site is not None and self._site.is_back)
        self._check.step(may_be_resumed=bool(self._outer_state()) and not is_back)
        if self._agree():
            return False
        if self._watched and self.steps == 0:
            must_not_be_wrapped(self.model, self._lane.across)
        if not self._stops:  # only when a step follows, so that nothing is announced after the last exchange
            self._begin_round()
        self._record.open(self.rounds if self.steps_taken else None)  # after a load, which decides what of it is void
        self._record.step(loss)
        self.steps = self._watch.steps = self.steps + 1
        with torch.no_grad(), self._whole_or_over():
            self._advance()
            while self._stops and self._stops[0].step == self.steps:
                stop = self._stops.pop(0)
                try:
                    self._exchange(stop)
                except LeftOutError as error:
                    self._take_anothers_state(error.source)
                    return False
                if self._stops:
                    self._loop.announce(self.rounds, self._stops[0])
        if self._stops:
            return False
        self._end_round()
        return True

    def _begin_round(self) -> None:
        if self._site is not None:
            self._site.begin_round(self.rounds)
        self._loop.local_steps = self._watch.local_steps = self.local_steps
        self._loop.begin_round(self.rounds)
        self._stops = [stop for stop in self._loop.stops(self.rounds) if stop.step > self.steps]
        self._loop.announce(self.rounds, self._stops[0])

    def _end_round(self) -> None:
        self.steps = self._watch.steps = 0
        self.rounds += 1
        self._count_waits()
        lr = None if self.lr is None else self.lr()
        self._record.end_round(self.rounds - 1, self._timetable.begin(self.rounds), lr)
        self._meter.rounds += 1
        self._watch.exchanged = True
        if self._site is not None:
            self._site.keep(self.rounds, self._for_others())
            after, self.rounds = self.rounds, self._site.next_round()
            if self.rounds > after + REJOIN_ROUNDS:
                self._take_anothers_state(None, self.rounds)

    def _exchange(self, stop: Stop) -> None:
        with self._record.exchanging(), self._meter.exchanging(), self._explaining():
            if self._store is not None:
                self._look()
                if (sent := self._store.exchange()) is None:
                    raise LeftOutError(self.worker, self.rounds, None)
                self._meter.count(sent)
                self._record.sent(self.rounds, sent)
                return
            with self._all_or_none(f"round {self.rounds}", self.rounds, self.steps):
                self._look()
                sent = self._loop.post(self.rounds, stop)
                self._meter.count(sent)
                self._record.sent(self.rounds, sent)
                for due in self._loop.due(self.rounds, stop):
                    if due in self._loop.in_flight:
                        self._loop.in_flight[due].receive()
            self._loop.receive(self.rounds, stop)
            self._flat.write()

    def _for_others(self) -> dict[str, Any]:
        """State for a site that comes back."""
        rest = rest_of(self.model) if self._takes_rest else {}
        outer = [leaf.detach().cpu() for leaf in self._outer_state()]
        return {"x": self.x.detach().cpu(), "outer": outer, "rest": [t.cpu() for t in rest.values()]}

    def _take_anothers_state(self, source: int | None, round: int = 0) -> None:
        """Continues with the state of another site, from this round or from the one that the state is after.

        In a store that state is taken already.
        """
        self._loop.in_flight.clear()
        if self._store is None:
            round = max(round, self._load_from_site(source))
        self.rounds, self.steps, self._stops = self._store.round if self._store is not None else round, 0, []
        self._watch.steps, self._watch.exchanged = 0, self.rounds > 0
        self._check.forget_start()
        self._record.drop_round()

    def _load_from_site(self, source: int | None) -> int:
        """Takes the state of another site, this one first; returns the round that follows it."""
        assert self._site is not None
        rest = rest_of(self.model) if self._takes_rest else {}
        tensors_here = [self.x, *self._outer_state(), *rest.values()]

        def load(tensors: Sequence[torch.Tensor]) -> None:
            with torch.no_grad():
                for target, other in zip(tensors_here, tensors, strict=True):
                    target.copy_(other)
                self._loop.forget_unsent()
                self._flat.write()

        return self._site.take(tensors_here, load, source)

    @apart()
    def finish(self) -> None:
        """Completes the exchanges in flight when training ends, even within a round; without overlap there are none.

        All workers must call it after the same step; one that continues gets an error naming those that ended. Inner steps since
        the last exchange stay with each worker. Raises: PeerError; ConfigError as `step` does.
        """
        self._must_be_open("finish")
        if self._loop.rest():
            self._agree()
        with torch.no_grad(), self._whole_or_over(), self._meter.exchanging(), self._explaining():
            with self._all_or_none("finish()", self.rounds, self.steps):
                self._look()
                for exchange in self._loop.in_flight.values():
                    if exchange.sent is not None:
                        exchange.receive()
            self._loop.end()
            self._flat.write()
        self._leave()
        self._watch.end()

    @apart()
    def common_steps(self, mine: int) -> int:
        """The fewest steps that any worker can take, so that all end together.

            for batch in itertools.islice(loader, outer.common_steps(len(loader))):
                ...

        Args: `mine` is how many this worker can take. A collective: all workers call it at the same place.
        Raises: PeerError naming who does not; ConfigError for what is no number of steps.

        >>> import gossamer, torch
        >>> gossamer.Outer(torch.nn.Linear(2, 1), "gossip").common_steps(50)
        50
        """
        self._must_be_open("common_steps")
        check_option("common_steps", "mine", mine, Number)
        counts = self._peers.agree("common_steps", mine)
        if wrong := [worker for worker, one in enumerate(counts) if type(one) is not int or one < 0]:
            raise PeerError(
                f"worker {wrong[0]} does not say how many steps it can take; call common_steps on all workers"
            )
        return self._siblings.fewest(min(counts))

    def metrics(self) -> OuterMetrics:
        """Costs of this worker's exchanges since the previous call, or since the start; needs no other worker.

        `disagreement` is the root mean square, per number, of what was received minus what was sent in the exchanges that
        ended: with `sqrt(Σ_j ||m_j - m_i||² / (k P))` of the k messages m_j of P numbers that worker i received. Where the rule
        sends parameters (`gossip`, `gasloc`), this is how far the worker is from its peers. A rule that takes a mean over all
        workers (`local_sgd`, `diloco`) receives that mean alone, so it is how far the worker is from all. Where a rule sends
        differences, it is how far those are apart; for pseudo-gradients of workers that began the round alike (`diloco`)
        that is how far the parameters were apart when they were sent.

        Messages are compared from the first call on, so that call has None; call it once at the start. Exchanges that
        `load_state_dict` sends again count no bytes.

        Cost: none before the first call; then 1 ns per number and message received, on one thread of a CPU. No bit changes.

        >>> import gossamer, torch
        >>> with gossamer.Outer(torch.nn.Linear(2, 1), "gossip", local_steps=1) as outer:
        ...     _ = outer.step()
        ...     metrics = outer.metrics()
        >>> metrics.rounds, metrics.bytes_sent, metrics.disagreement
        (1, 0, None)
        """
        self._count_waits()
        self._loop.compare_messages(self._meter.compare)
        return self._meter.read()

    def _count_waits(self) -> None:
        """Counts the waits and deliveries since the last call, for metrics and record."""
        waits, deliveries = self._peers.waits(self._loop.exchanges)
        self._meter.add_waiting(sum(wait.end_s - wait.start_s for wait in waits))
        self._record.waited(waits, deliveries)

    def _reduced(self, seconds: float) -> None:
        self._meter.add_waiting(seconds)
        self._record.reduced(seconds)

    def losses(self, mine: float) -> dict[int, float]:
        """Publishes this worker's loss, and returns the latest published loss of each worker; never blocks.

            mean = statistics.fmean(outer.losses(loss.item()).values())

        Losses may be of an earlier step. With `elastic=True` they are some seconds old and of live workers only, and none arrive
        while site 0 is away. In a store those of others are not known. In workers of several processes let the same ones call it,
        such as the first.

        Raises: ConfigError for what is no number. A loss that is not finite is not published.
        Cost: two messages to the store of the workers; with `elastic=True` none, and every two seconds two by a thread.

        >>> import gossamer, torch
        >>> gossamer.Outer(torch.nn.Linear(2, 1), "gossip").losses(0.5)
        {0: 0.5}
        """
        self._must_be_open("losses")
        check_option("losses", "mine", mine, Annotated[float, Field(allow_inf_nan=True)])
        if self._store is not None:
            return {self.worker: mine}
        return self._peers.losses(mine) if self._site is None else self._site.losses(mine)

    @contextlib.contextmanager
    def mean_model(self) -> Iterator[M]:
        """The model with the mean of all workers' parameters in it, `(1/n) Σ_i x_i`, to evaluate, save or export it.

            with outer.mean_model() as mean:
                mean.eval(); validate(mean)
                if outer.worker == 0: mean.save_pretrained("trained")
            model.train()

        `mean.state_dict()` has the names of the plain model, also where it or parts of it are compiled.

        A collective: all workers must enter it after the same step; leaving it is local. The mean is taken in fp32 in worker
        order, so it is the same to the last bit on all workers and in a simulation. Floating-point buffers, such as batch-norm
        statistics, are averaged alike; integer buffers and frozen parameters stay. When the block ends, also by an error,
        parameters and buffers are what they were, to the last bit; optimizer and gradients are not touched at all.

        It may be entered within a round. Exchanges in flight stay in flight, and their updates are not in the mean: call
        `finish` before the last one. Do not train in it: `step`, `finish`, `state_dict`, `load_state_dict` and another
        `mean_model` are refused.

        Raises: PeerError, after `timeout_s`, naming a worker that did not come; ConfigError as `step` does.
        Cost: 2 (n-1)/n models each way and the memory of three more; nothing is sent where there is one worker.

        >>> import gossamer, torch
        >>> outer = gossamer.Outer(torch.nn.Linear(2, 1), "gossip")
        >>> with outer.mean_model() as mean:
        ...     answer = mean(torch.ones(2))
        """
        self._must_be_open("mean_model")
        if (self._site is not None or self._store is not None) and self.n > 1:
            given, members = ("elastic=True", "sites") if self._store is None else ("store=...", "workers")
            raise ConfigError(
                f"mean_model() was called with {given}, where nobody knows which of {self.n} {members} would come to it; after a "
                "mean over everyone the model is that mean, and after gossip take that of one of them, or the mean of saved ones"
            )
        buffers = dict(self.model.named_buffers())
        averaged = [local(t) for t in buffers.values() if t.is_floating_point() and t.layout == torch.strided]
        saved = [(t, t.detach().clone()) for t in buffers.values()]
        self._means += 1
        self._peers.publish("mean", self._means)

        def missing() -> list[int]:
            entered, count = self._peers.published("mean"), self._means
            return [worker for worker in range(self.n) if worker != self.worker and entered.get(worker) != count]

        with apart(), waiting_for(missing, self.worker, min(_PATIENCE_S, self._timeout_s / 4)):
            try:
                with self._siblings.all_or_none("mean_model()", self.rounds, self.steps):
                    self._flat.read()
                    mean, *means = mean_over_workers(
                        [self.x, *averaged], self._peers.transport, self.n, self.rounds, self._loop.exchanges
                    )
            except PeerError as error:
                raise PeerError(
                    f"the mean model was not made, as not all workers entered mean_model(): {error}"
                ) from error
        self._mean_is_in = True
        try:
            with self._flat.showing(mean), with_bare_names(self.model):
                with torch.no_grad():
                    for t, other in zip(averaged, means, strict=True):
                        t.copy_(other.view(t.shape))
                del mean, means
                yield self.model
        finally:
            self._mean_is_in = False
            with torch.no_grad():
                for t, before in saved:
                    t.copy_(before)
            for name, t in buffers.items():  # a replaced one is restored
                owner, _, key = name.rpartition(".")
                self.model.get_submodule(owner)._buffers[key] = t

    def state_dict(self) -> OuterState:
        """The outer state, to be saved together with your model and optimizer after any step, the same on all workers.

        It states its origin (`OuterState.of`), and holds the exchanges in flight, which are sent again when it is loaded.
        Raises: ConfigError in `mean_model`.
        """
        self._must_be_usable("state_dict")
        self._watch.saved = True
        return {
            "format": FORMAT,
            "of": dict(self._is_of),
            "start": self._peers.start,
            "outer": [leaf.clone() for leaf in self._outer_state()],
            "under_way": self._in_flight(),
            "rounds": self.rounds,
            "steps": self.steps,
        }

    @apart()
    def load_state_dict(self, state: OuterState | Mapping[str, Any]) -> None:
        """Loads a saved outer state, after the model's parameters were loaded; training continues from that step.

        All workers load, each its own; at the next `step` they compare where they continue. The rule's `lr` may be another than
        when it was saved. A state of gossamer 0.1.0 does not record what it belongs to, and is loaded with a warning.

        Raises: CheckpointError if it is of another rule, codec, schedule, worker, number of workers or of local steps, or model,
            if it is incomplete, or if this Outer has exchanges in flight: load it before the first step of a round. Later
            PeerError at `step` when workers continue from different steps or runs.
        """
        self._must_be_open("load_state_dict")
        self._must_not_have_begun()
        self._watch.begin()  # the model was loaded, whether the state is accepted or refused
        if self._loop.in_flight:
            raise CheckpointError(
                f"a state was given after {self.steps} steps of round {self.rounds}, with {len(self._loop.in_flight)} exchanges "
                "in flight; load it into a new Outer"
            )
        tensors = self._outer_state()
        if isinstance(state, Mapping):
            layouts = layouts_with_wrappers(self.model, self.layout)
            models = [describe_model(one, self.x.dtype, self._flat.words) for one in layouts]
            require_matching_state(state, self._is_of, models)
        try:
            rounds, steps, saved = state["rounds"], state["steps"], list(state["outer"])
            self._must_be_place(rounds, steps)
            must_fit(saved, tensors)
            in_flight = {(one["round"], one["fragment"]) for one in state["under_way"]}
            if in_flight and in_flight != (expected := self._sent_by(rounds, steps)):  # none after `finish`
                raise ValueError(f"{sorted(in_flight)} are in flight where the schedule has {sorted(expected)}")
            self._loop.restore_in_flight(state["under_way"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            self._loop.in_flight.clear()
            raise CheckpointError(
                f"the outer state does not fit rule '{self.method.rule.name}' with {self.local_steps} local steps on this model "
                f"({error!r:.200}); load it with the rule, the model, the schedule and the local steps it was saved with"
            ) from None
        for target, other in zip(tensors, saved, strict=True):
            target.copy_(other)
        self._continue_from(rounds, steps, state.get("start"))

    def shared_state_dict(self) -> dict[str, Any]:
        """The outer state under flat names, for `torch.distributed.checkpoint`; another number of processes may load it.

        Its tensors are the state itself and lie on the processes of a worker as their parameters do: `dcp.load` fills them.
        Raises: ConfigError while exchanges are in flight, as with a schedule that overlaps, or where processes have copies.
        """
        self._must_be_usable("shared_state_dict")
        if self._in_flight():
            raise ConfigError(
                f"shared_state_dict() was called with exchanges of round {self.rounds} in flight, which belong to one number of "
                "processes; call it where none are, use a schedule without overlap, or save state_dict() on each process"
            )
        state: dict[str, Any] = {
            "outer.of": json.dumps(self._is_of_whatever_shards),
            "outer.start": self._peers.start,
            "outer.rounds": self.rounds,
            "outer.steps": self.steps,
        }
        for setup in self._loop.fragments:
            part = setup.part
            for copy, flat in enumerate(leaves(part.s)):
                if flat.numel() != part.x.numel():
                    state[f"outer.{copy}.fragment.{part.fragment}"] = flat
                    continue
                for leaf in part.layout.leaves:
                    name, shared = self._flat.named(leaf, flat[leaf.start : leaf.stop])
                    state[f"outer.{copy}.{name}"] = shared
        if self._flat.kept:
            raise ConfigError(
                f"shared_state_dict() was called for a model with {len(self._flat.kept)} parameters that are rounded from "
                "others' dtype; save state_dict() on each process instead"
            )
        return state

    @property
    def _is_of_whatever_shards(self) -> dict[str, str]:
        return {key: words for key, words in self._is_of.items() if key not in ("model", "shard")}

    def load_shared_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state of `shared_state_dict`, after `dcp.load` has filled its tensors, and the model was loaded.

        Raises: CheckpointError if it is of another rule, codec, schedule, worker, number of workers or local steps, or not whole.
        """
        self._must_be_open("load_shared_state_dict")
        self._must_not_have_begun()
        self._watch.begin()  # the model was loaded, whether the state is accepted or refused
        current = self.shared_state_dict()
        try:
            saved = {"format": FORMAT, "of": json.loads(state["outer.of"]), "start": state["outer.start"]}
            require_matching_state(saved, self._is_of_whatever_shards)
            rounds, steps = state["outer.rounds"], state["outer.steps"]
            self._must_be_place(rounds, steps)
            tensors = {key: t for key, t in current.items() if isinstance(t, torch.Tensor)}
            must_fit([local(state[key]) for key in tensors], [*map(local, tensors.values())])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"the outer state under flat names does not fit rule '{self.method.rule.name}' on this model ({error!r:.200}); "
                "load it with torch.distributed.checkpoint into that of shared_state_dict()"
            ) from None
        with torch.no_grad():
            for key, t in tensors.items():
                local(t).copy_(local(state[key]))
        self._continue_from(rounds, steps, str(state["outer.start"]))

    def _must_be_place(self, rounds: int, steps: int) -> None:
        """Raises ConfigError for rounds and steps that no saved state has."""
        check_option("a saved outer state", "rounds", rounds, Annotated[int, Field(ge=0, le=(1 << 31) - 1)])
        most = self._timetable.at(rounds).full_steps - 1
        check_option("a saved outer state", "steps", steps, Annotated[int, Field(ge=0, le=most)])

    def _continue_from(self, rounds: int, steps: int, start: str | None) -> None:
        self.rounds, self.steps, self._stops = rounds, steps, []
        self._loaded, self._agreed = start, False
        self._check.begin(steps)
        self._watch.steps, self._watch.resumes, self._watch.exchanged = steps, True, rounds > 0

    def _in_flight(self) -> list[InFlight]:
        return self._closed_with if self._closed else self._loop.state_in_flight()

    def _outer_state(self) -> list[torch.Tensor]:
        return [*leaves(self._loop.state), *self._flat.kept]

    def _sent_by(self, rounds: int, steps: int) -> set[tuple[int, int]]:
        """Round and fragment of the messages in flight after so many steps of this round."""
        sent = set[tuple[int, int]]()
        for round in range(max(0, rounds - self.method.rule.delay_rounds - 2), rounds + 1):
            for stop in self._loop.stops(round):
                if round < rounds or stop.step <= steps:
                    sent |= {(round, p) for p in stop.sends}
                    sent -= {(round - lag, p) for p, lag in stop.receives}
        return sent

    def close(self) -> None:
        """Ends the outer loop and its connections; your own process group stays open. A second call does nothing."""
        if not self._closed:
            self._forgotten.detach()
            if not self._watch.quiet:
                self._leave()  # before the connections end, so that a peer that sees one closed can read the reason
                self._watch.end()
                if self._site is not None:
                    self._site.transport.stay_for_late()
            self._closed_with = self._loop.state_in_flight()
        self._closed = True
        self._check.end()
        self._loop.in_flight.clear()
        if self._store is not None:
            self._store.close()
        self._peers.close()
        self._siblings.close()
        self._record.close()

    def _leave(self) -> None:
        """Publishes where this worker ends, for workers that later wait for it in vain."""
        if not self._left:
            self._peers.publish("left", [self.rounds, self.steps, self.local_steps])
            self._left = True

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuses copies and pickles of what has connections; one process alone may be copied with its model."""
        if self.n == self._lane.shards == 1 and self._store is None:
            return super().__reduce_ex__(protocol)
        raise ConfigError(
            f"{self} was copied or pickled, and its connections exist once; copy or save outer.state_dict() beside "
            "model.state_dict(), and load both where another Outer is made"
        )

    def __enter__(self) -> "Outer[M]":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._watch.quiet = True  # the error comes first, and not a warning of what it left undone
        self.close()

    def _must_be_open(self, call: str) -> None:
        if self._closed:
            raise ConfigError(
                f"{call}() was called on an Outer that was closed after round {self.rounds}; call close() last, or make another"
            )
        self._must_be_usable(call)

    def _must_be_usable(self, call: str) -> None:
        if self._mean_is_in:
            raise ConfigError(
                f"{call}() was called inside mean_model(), where the model holds the mean of all workers; leave the block first"
            )
        if self._is_over:
            how = " on all workers, and load the state that they saved last"
            if self._site is not None or self._store is not None:
                how = ", which takes the state of the run"
            raise ConfigError(
                f"{call}() was called after the exchange of round {self.rounds} had failed, which leaves nothing to continue "
                f"from; make another Outer{how}"
            )

    def _must_not_have_begun(self) -> None:
        if self._store is not None:
            raise CheckpointError(
                f"a state was given after {self.rounds} rounds with store=..., which has parameters and outer state, taken when "
                "Outer was made; load the state of your inner optimizer alone"
            )
        if self._site is not None and self._agreed:
            raise CheckpointError(
                f"a state was given after {self.rounds} rounds with elastic=True, where the other sites go on; load it before "
                "the first step, and on all sites that start together"
            )

    def _agree(self) -> bool:
        """Compares with all workers where they continue, once after the start and after each load.

        It comes before the first exchange: messages of different rounds never meet, and each worker would wait for the other's
        until its timeout. Returns: whether this site has come back, and continues with another's state instead.
        """
        if self._agreed:
            return False
        if self._site is not None and self._site.is_back:
            self._take_anothers_state(None)
            self._agreed = True
            return True
        with self._explaining(), self._siblings.all_or_none("the first step", self.rounds, self.steps):
            must_continue_alike(self._peers.agree("step", [self.rounds, self.steps, self.local_steps, self._loaded]))
        if self._site is not None:
            self._peers.part()  # site 0 may die, and the store with it
            self._site.keep(self.rounds, self._for_others())
        self._agreed = True
        return False

    def _advance(self) -> None:
        """Advances the exchanges in flight. An error in a shard waits for the next stop, where its siblings learn of it too."""
        if self._lane.shards == 1:
            return self._loop.advance()
        try:
            self._loop.advance()
        except Exception as error:
            self._failed = error

    @contextlib.contextmanager
    def _all_or_none(self, operation: str, *numbers: int) -> Iterator[None]:
        """See `Siblings.all_or_none`; raises inside it what has failed since the last stop."""
        with self._siblings.all_or_none(operation, *numbers):
            if self._failed is not None:
                raise self._failed
            yield

    @contextlib.contextmanager
    def _whole_or_over(self) -> Iterator[None]:
        """What fails inside leaves an exchange half done, from which no call continues and no state can be saved."""
        try:
            yield
        except BaseException:
            self._is_over = self._watch.quiet = True  # the error comes first, and not a warning of what it left undone
            if self._site is not None:  # the others shall not wait for one that has failed
                self._peers.close()
            raise

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Extends the error of a peer that fails in an exchange by whether it has left its loop."""
        try:
            yield
        except PeerError as error:
            self._watch.quiet = True
            raise explained(
                error, self._peers.published("left"), self._peers.published("mean"), self._means, self.local_steps
            ) from error

    def _look(self) -> None:
        """Checks what must hold whenever the flat buffer is sent or overwritten."""
        if self._watched and not self._stops:
            self._watched = False
            must_not_be_wrapped(self.model, self._lane.across)
        must_hold(self.model, self._forgotten)
        self._flat.read()
        self._check.exchange(self._peers, self.steps, self.lr)


def _must_be_options(**given: object) -> None:
    """Raises ConfigError for values of other types than those of these options, which no other part checks."""
    for name, value in given.items():
        check_option("Outer", name, value, OuterOptions.__annotations__[name])


class _MeetingPlace(NamedTuple):
    """Where the workers meet: in a process group, under a launcher, as sites, or in a store."""

    site: tuple[int, int] | None
    join: str | None
    elastic: bool
    process_group: dist.ProcessGroup | None
    peers: str | Path | None
    store: str | Path | None
    workers: int | None

    def check(self, reduction: Reduction) -> None:
        """Raises ConfigError unless these name one place."""
        site, join, elastic, group, peers, store, workers = self
        others = {"site": site, "join": join, "elastic": elastic, "process_group": group}
        must_be_in_a_store(store, workers, others)
        must_be_a_site(site, join, group, elastic, peers if store is None else None, reduction)

    def lane_here(self, mesh: "DeviceMesh | None", timeout_s: float) -> Lane:
        """The place of this process among all of them."""
        if self.workers is not None:
            return Lane(sites=self.workers, keys=keys_in_store(self.peers, self.workers))
        keys = keys_of_sites(self.peers, self.site)
        if self.site is not None:
            return lane_of_site(self.site, mesh, timeout_s, keys)
        lane = lane_in(ranks_of(self.process_group), mesh, timeout_s)
        if lane.n > 1:
            warn_between_machines()
        _warn_of_one_worker(lane)
        return lane


def _warn_of_one_worker(lane: Lane) -> None:
    if lane.n == 1 < lane.shards:
        log.warning(
            "all %d processes hold one model together, so there is one worker and nobody to exchange with; shard each model "
            "over the processes of one site, as with fully_shard(model, mesh=mesh['shard'])",
            lane.shards,
        )


def _method_of(facts: Combination, *, compile: bool) -> tuple[Method, Timetable]:
    """The method and its local steps. Raises: PairingError for parts that do not fit each other."""
    facts = facts._replace(rule=settled_rule(facts))
    method = method_of(facts, compile=compile)
    for sentence in warnings_of(facts):
        log.warning(sentence)
    assert facts.local_steps is not None
    return method, facts.timetable or timetable_of(((0, facts.local_steps),))
