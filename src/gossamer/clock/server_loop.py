"""Workers and a server that absorbs their pushes as they arrive, over virtual time."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.asynchronous import ServerRule, Slack
from gossamer.clock.durations import Durations
from gossamer.clock.event_queue import ARRIVAL, DECISION, RELAY, REPLY, EventQueue, EventQueueState, VirtualTimeLoop
from gossamer.clock.events import Absence, Phase, Record, Relay, Transfer, Update
from gossamer.clock.fragment import Push, RegionReport
from gossamer.clock.global_core import GlobalCore, GlobalState
from gossamer.clock.phases import DEFAULTS, Learner, LoopOptions, PhaseEnd, Phases, PhasesState
from gossamer.clock.saved import as_dicts, rebuilt, within
from gossamer.clock.server_core import WAITS, CoreState, Send, ServerAction, ServerCore
from gossamer.clock.server_worker import ServerWorker, ServerWorkerState
from gossamer.network.links import Network
from gossamer.record.logs.seconds import SERVER
from gossamer.rounds.compatibility.combination import Combination
from gossamer.rounds.compatibility.incompatibilities import check
from gossamer.tree import must_fit, nbytes


class _Arrival(NamedTuple):
    """An event: a push arrives."""

    worker: int
    epoch: int
    push: Push
    slack: Slack
    bytes: int
    start_s: float


class _Reply(NamedTuple):
    """An event: starting points arrive."""

    epoch: int
    sent: Send
    start_s: float


class _Closing(NamedTuple):
    """An event: a window may close."""

    region: int


class _ReportArrival(NamedTuple):
    """An event: the report of a region arrives at the global server, which absorbs it and sends its model."""

    region: int
    report: RegionReport
    start_s: float


class _Merge(NamedTuple):
    """An event: the global model arrives at a region."""

    region: int
    fragment: int
    x: Tensor
    start_s: float


_EVENTS = (PhaseEnd, Absence, _Arrival, _Reply, _Closing, _ReportArrival, _Merge)


class _ServerState(NamedTuple):
    """The part of a checkpoint for this loop: the cores of regions, the global one, and the workers."""

    agenda: EventQueueState
    phases: PhasesState
    cores: list[CoreState]
    above: GlobalState | None
    workers: list[ServerWorkerState]


class ServerRun(VirtualTimeLoop):
    """Workers that push pseudo-gradients to a server and fetch the next starting points, each at its own speed.

    After its k-th local phase a worker pushes fragment k mod `len(spans)`. It then waits for the reply. With `overlap` it
    continues to train, and uses the reply at the end of the phase in which it arrives; its drift of that fragment since the push
    is lost. A server with a window also closes it when no worker can push any more.

    With a rule for regions, each site of the network has a server for its own workers, next to them, and a global server in
    the site of worker 0 takes their reports. A report and its answer take the seconds of the route between the two
    sites, and do not block workers; as one report per fragment is in flight at a time, and regions use different
    routes, a model in one fragment never shares its route. When no worker can push any more, each region reports its
    remaining progress.

    A worker that leaves loses its current phase; its pushes in flight still count. When it returns it fetches all fragments.

    Args:
        learners: all start from the parameters of the first.
        network: links of the workers to the server, whose own link has no limit, routes, and seconds of an inner step.
        spans: the fragments, each a slice of the flat vector with its own ages and state; None is the whole vector.
        overlap: whether workers train while a reply is in flight; needs at least two fragments.
        options: absences, budget and so on; pushes go through the codec, all else is sent as it is. The run ends when all
            pushes have been absorbed, and all reports.
    Raises: ConfigError for options that do not fit together.
    Cost: the rule's state at each server; one starting point per worker in addition to its model.
    """

    def __init__(
        self,
        rule: ServerRule,
        learners: Sequence[Learner],
        network: Network,
        *,
        spans: Sequence[tuple[int, int]] | None = None,
        overlap: bool = False,
        options: LoopOptions = DEFAULTS,
    ) -> None:
        x, layout = learners[0].x.cpu(), learners[0].layout  # the server computes on the host, as real ones do
        self.spans = ((0, layout.numel),) if spans is None else spans
        check(Combination(kind="server", server=rule.name, fragments=len(self.spans), overlap=overlap))
        self.learners = learners
        self._options, self._durations = options, Durations(network, len(learners))
        self._queue = EventQueue(self._perform, self._flush)
        regions = self._durations.regions if rule.regions is not None else (0,) * len(learners)
        self._region, self._near = regions, rule.regions is not None
        steps = [learner.local_steps for learner in learners]
        self._cores = [ServerCore(rule, x, layout, self.spans, steps) for _ in range(max(regions) + 1)]
        self._global = rule.regions and GlobalCore(rule.regions.rule, x, self.spans, self._cores[0].layouts)
        self._workers: list[ServerWorker] = []
        for i, learner in enumerate(learners):
            for action in self._core(i).join(i):
                assert isinstance(action, Send)
                self._workers.append(ServerWorker(learner, self.spans, action.starts, overlap=overlap))
        self._phases = Phases(self._queue, self._durations, learners, options, self._end_phase, self._change)
        for i in range(len(learners)):
            self._phases.begin(i)

    def model(self) -> Tensor:
        """The server's parameters `[P]`; those of the global server where there is one."""
        return self._cores[0].model() if self._global is None else self._global.model()

    def states(self) -> list[Any]:
        """The state of the rule for each fragment; of all regions in their order, and then of the global server."""
        local = [state for core in self._cores for state in core.states()]
        return local if self._global is None else [*local, *self._global.states()]

    def state(self) -> dict[str, Any]:
        """The part of a checkpoint for this loop; the learners have separate parts."""
        cores, above = [core.whole_state() for core in self._cores], self._global and self._global.state()
        workers = [worker.state() for worker in self._workers]
        return as_dicts(_ServerState(self._queue.state(), self._phases.state(), cores, above, workers))

    def restore(self, state: Any) -> None:
        """Continues from a state, before the learners are restored. Raises ValueError when it does not fit."""
        saved, parts = rebuilt(_ServerState, state), len(self.spans)
        limits = {"worker": len(self.learners), "fragment": parts, "region": len(self._cores)}
        within(saved.cores, **limits)
        if (saved.above is None) != (self._global is None):
            raise ValueError("one of the two has a global server")
        for core, saved_part in zip(self._cores, saved.cores, strict=True):
            core.restore_whole(saved_part)
        if self._global is not None and saved.above is not None:
            self._global.restore(saved.above)
        for worker, saved_part in zip(self._workers, saved.workers, strict=True):
            worker.restore(saved_part)
        self._phases.restore(saved.phases)
        events = self._queue.restore(saved.agenda, _EVENTS)
        within(events, **limits)
        x = self.learners[0].x
        for p, tensor in (payload for event in events for payload in _of_fragments(event)):
            if not 0 <= p < parts:
                raise ValueError(f"a message of fragment {p}, of {parts}")
            must_fit([tensor], [x[slice(*self.spans[p])]])

    def _core(self, worker: int) -> ServerCore:
        return self._cores[self._region[worker]]

    def _transfer_s(self, source: int, target: int, size: int) -> float:
        return self._durations.transfer_s(source, target, size, near=self._near)

    def _end_phase(self, i: int, number: int, start_s: float) -> list[Record]:
        worker = self._workers[i]
        report, push = worker.train(number)
        if push is not None:
            layout = worker.learner.layout.slice(*self.spans[push.fragment])
            on_host = torch.device("cpu")
            message, size = self._options.transmit(push.message, layout, i, number, push.fragment, on=on_host)
            push_s = self._transfer_s(i, SERVER, size)
            arrives_s, slack = self.time_s + push_s, WAITS
            if worker.overlap:
                # The reply is used at the end of the next phase, which takes about as long as this one.
                steps = worker.learner.local_steps
                reply_s = self._transfer_s(SERVER, i, nbytes(push.message))
                slack = Slack(steps, (self.time_s - start_s) / steps, push_s + reply_s)
            epoch, push = self._phases.epoch[i], push._replace(message=message)
            self._queue.plan(arrives_s, ARRIVAL, i, _Arrival(i, epoch, push, slack, size, self.time_s))
        if worker.waits_for is None:
            self._phases.begin(i)
        return [Phase(start_s, self.time_s, i, number, report)]

    def _arrive(self, i: int, epoch: int, push: Push, slack: Slack, size: int, start_s: float) -> list[Record]:
        arrived = Transfer("push", start_s, self.time_s, i, SERVER, push.fragment, size)
        waits = epoch == self._phases.epoch[i]
        actions = self._core(i).push(i, push, self.time_s, reply=waits, slack=slack)
        return [arrived, *self._carry_out(self._region[i], actions)]

    def _tick(self, region: int) -> list[Record]:
        return self._carry_out(region, self._cores[region].tick(self.time_s))

    def _flush(self) -> list[Record]:
        records: list[Record] = []
        for region, core in enumerate(self._cores):
            records += self._carry_out(region, core.flush(self.time_s))
            while closed := self._tick(region):
                records += closed
        return records

    def _perform(self, event: Any) -> list[Record]:
        match event:
            case _Arrival():
                return self._arrive(*event)
            case _Reply():
                return self._receive(*event)
            case _Closing():
                return self._tick(*event)
            case _ReportArrival():
                return self._answer(*event)
            case _Merge():
                return self._merge(*event)
            case _:
                return self._phases.perform(event)

    def _carry_out(self, region: int, actions: Sequence[ServerAction]) -> list[Record]:
        """Plans the actions of a region's core; returns its updates."""
        for action in actions:
            if isinstance(action, Send):
                size = sum(nbytes(start.x) for start in action.starts.values())
                arrives_s = self.time_s + self._transfer_s(SERVER, action.worker, size)
                reply = _Reply(self._phases.epoch[action.worker], action, self.time_s)
                self._queue.plan(arrives_s, REPLY, action.worker, reply)
            elif isinstance(action, RegionReport):
                arrives_s = self.time_s + self._durations.relay_s(region, nbytes(action.message))
                self._queue.plan(arrives_s, RELAY, region, _ReportArrival(region, action, self.time_s))
            elif not isinstance(action, Update):
                self._queue.plan(action.at_s, DECISION, action.fragment, _Closing(region))
        return [action for action in actions if isinstance(action, Update)]

    def _answer(self, region: int, report: RegionReport, start_s: float) -> list[Record]:
        """The global server absorbs a report, and sends its model to that region."""
        assert self._global is not None
        p, size = report.fragment, nbytes(report.message)
        x = self._global.report(region, p, report.message)
        merge = _Merge(region, p, x, self.time_s)
        self._queue.plan(self.time_s + self._durations.relay_s(region, nbytes(x)), RELAY, region, merge)
        return [Relay("report", start_s, self.time_s, region, p, size)]

    def _merge(self, region: int, p: int, x: Tensor, start_s: float) -> list[Record]:
        self._cores[region].merge(p, x)
        return [Relay("merge", start_s, self.time_s, region, p, nbytes(x))]

    def _receive(self, epoch: int, sent: Send, start_s: float) -> list[Record]:
        i = sent.worker
        if epoch != self._phases.epoch[i]:
            return []
        if self._workers[i].receive(sent.starts):
            self._phases.begin(i)
        return [
            Transfer("fetch", start_s, self.time_s, SERVER, i, p, nbytes(start.x)) for p, start in sent.starts.items()
        ]

    def _change(self, absence: Absence) -> list[Record]:
        i = absence.worker
        self._workers[i].leave()
        core = self._core(i)
        actions = core.join(i) if absence.change == "return" else core.leave(i, self.time_s)
        return self._carry_out(self._region[i], actions)


def _of_fragments(event: Any) -> list[tuple[int, Tensor]]:
    """The tensors of an event, each with its fragment."""
    match event:
        case _Arrival(push=push):
            return [(push.fragment, push.message)]
        case _Reply(sent=sent):
            return [(p, start.x) for p, start in sent.starts.items()]
        case _ReportArrival(report=report):
            return [(report.fragment, report.message)]
        case _Merge(fragment=p, x=x):
            return [(p, x)]
        case _:
            return []
