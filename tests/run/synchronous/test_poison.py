"""Nothing poisonous leaves, enters or is saved: a NaN or an infinity ends a run with the name of the worker it began with."""

import contextlib
import io
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

import liars
from codecs_in_use import VARIANTS
from drifted_rounds import context, drive, serially
from gossamer.asynchronous import cgad
from gossamer.clock.phases import LoopOptions
from gossamer.clock.server_core import ServerCore
from gossamer.codecs import Codec, exact, fitted, fp16, int8, topk
from gossamer.codecs.message import decode_received, encode
from gossamer.errors import TrainingError, TransportError
from gossamer.finite import all_finite, must_be_finite
from gossamer.layout import Layout, Leaf
from gossamer.record import checkpoint
from gossamer.rounds.exchange import Exchange, _decoded, begin, finish_all, initial_state
from gossamer.rounds.setup import Part, Setup
from gossamer.rules import Rule, choco, diloco, gasloc, robust, sgp
from gossamer.run.asynchronous.message_form import MessageForm
from gossamer.run.config.run_file import digest, dump
from gossamer.run.simulated.simulate import simulate
from gossamer.topologies import make_topology
from gossamer.transport import wire
from gossamer.transport.contract import Sound, Ticket
from gossamer.transport.memory import MemoryNetwork, MemoryTransport, Parcel
from gossamer.transport.processes.local import run_local
from gossamer.tree import leaves, refill
from poisoned import WORKER, poison, poisoned_main
from tiny import tiny

NEITHER = (torch.nan, torch.inf, -torch.inf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e5m2])
@pytest.mark.parametrize("value", NEITHER)
def test_one_element_that_is_not_finite_is_noticed_wherever_it_stands(value: float, dtype: torch.dtype) -> None:
    clean = torch.full((1000,), torch.finfo(dtype).max, dtype=torch.float64).to(dtype)
    whole = torch.arange(3)
    assert all_finite((clean, (whole, torch.empty(0)), -clean.double() if dtype.itemsize > 1 else clean))
    for place in (0, 499, 999):
        bad = clean.clone()
        bad[place] = value
        assert not all_finite((clean, (whole, bad)))
        with pytest.raises(
            TrainingError, match=r"^what b sent has numbers that are not finite; lower .* --set inner\.lr="
        ):
            must_be_finite({"what a sent": clean, "what b sent": bad, "what c sent": bad})


SLOW = {"step_s": 0.1, "uplink_bps": 1e8, "downlink_bps": 1e8}
METHODS = {
    "gossip": {},
    "mean": {"rule__name": "diloco", "topology__name": "complete"},
    "gradients": {"rule__name": "data_parallel", "topology__name": "complete", "run__local_steps": 1},
    "fragments": {"schedule__fragments": 2, "schedule__overlap_steps": 1, "run__local_steps": 2},
    "int8": {"rule__name": "diloco", "topology__name": "complete", "codec__name": "int8"},
    "averaging": {"inner__averaging": "schedule_free"},
    "server": {"server__name": "cgad", "network": {"slow": SLOW}},
    "pair": {"pair__name": "a2cid2", "topology__name": "ring", "network": {"slow": SLOW}},
    "no waiting": {"rule__name": "gossip", "run__wait": False, "network": {"slow": SLOW}},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", METHODS)
def test_an_infinite_gradient_that_no_loss_sees_ends_the_run_with_its_worker_and_is_never_saved(
    method: str, tmp_path: Path
) -> None:
    config = tiny(**METHODS[method])
    with poison(4), pytest.raises(TrainingError, match=rf"worker {WORKER} .*not finite"):
        simulate(config, tmp_path)
    for tensors in tmp_path.glob("checkpoints/*/*.safetensors"):
        owner, round = int(tensors.stem.partition("-")[2]), int(tensors.parent.name.partition("-")[2])
        state = checkpoint.load(tmp_path / "checkpoints", round, owner, digest(config))
        assert "x" not in state or all_finite(state["x"])


@pytest.mark.usefixtures("forks")
def test_real_workers_end_with_the_name_of_the_one_whose_numbers_are_not_finite(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(dump(tiny(workers=2, topology__name="complete", run__timeout_s=60)))
    errors, words = io.StringIO(), ["train", str(tmp_path / "run.toml"), "--out", str(tmp_path / "run")]
    with contextlib.redirect_stderr(errors):
        code = run_local(2, poisoned_main, words)
    assert code == 2, errors.getvalue()
    lines = [line for line in errors.getvalue().splitlines() if "gossamer: " in line]
    assert any(f"[{WORKER}] gossamer: the message of worker {WORKER} in round 2 has" in line for line in lines), lines
    assert all(f"worker {WORKER}" in line for line in lines) and len(lines) == 2, lines
    assert "Traceback" not in errors.getvalue()


def test_real_workers_continue_without_a_message_that_no_codec_can_decode(tmp_path: Path) -> None:
    config = tiny(
        topology__name="complete",
        rule__name="sparseloco",
        codec__name="topk2bit",
        run__timeout_s=60,
        run__steps=16,
        run__eval_every=0,
    )
    (tmp_path / "run.toml").write_text(dump(config))
    errors, folder = io.StringIO(), tmp_path / "run"
    with contextlib.redirect_stderr(errors):
        code = run_local(3, liars.bytes_of_ones, ["train", str(tmp_path / "run.toml"), "--out", str(folder)])
    assert code == 0 and "Traceback" not in errors.getvalue(), errors.getvalue()
    for worker in range(2):
        sentence = f"round {liars.FROM_ROUND + 1}: worker {worker} declined what worker {liars.LIAR} sent"
        assert sentence in errors.getvalue(), errors.getvalue()
    saved = [
        checkpoint.load(folder / "checkpoints", config.length.rounds, worker, digest(config))["x"]
        for worker in range(2)
    ]
    assert torch.equal(*saved)


def test_a_last_round_that_is_not_finite_is_not_saved_and_does_not_end_well(tmp_path: Path) -> None:
    config = tiny(workers=1, rule__name="local_sgd", topology__name="complete", run__steps=4, run__checkpoint_every=2)
    simulate(config, tmp_path)
    store, key = tmp_path / "checkpoints", digest(config)
    state = checkpoint.load(store, 2, 0, key)
    for part in ("x", "outer", "under_way"):
        bad = {**state, part: [torch.tensor([torch.nan])]}
        with pytest.raises(TrainingError, match=rf"state\.{part}.* of worker 0 after round 3 has numbers"):
            checkpoint.save(store, 3, 0, bad, digest=key)
    assert checkpoint.rounds(store, 0) == [1, 2]
    checkpoint.save(store, 3, 0, {**state, "inner": {"exp_avg_sq": torch.tensor([torch.inf])}}, digest=key)


class Mailboxes(MemoryNetwork):
    """A network whose `deliver` may be changed, and the parameters of its workers."""

    def __init__(self, deliver: Callable[[Parcel], bool]) -> None:
        super().__init__(3, lambda parcel: self.deliver(parcel))
        self.deliver, self.xs = deliver, list[Tensor]()


def begun(
    rule: Rule, codec: Codec, start: float, end: float, forger: int | None = None
) -> tuple[Mailboxes, list[Exchange], list[list[int]]]:
    """A round of three workers from `start`, of which worker 1 has come to `end`; what the forger posts first is held back."""
    mixing = make_topology("complete", 3, seed=0).mixing(0)
    exchanges, declined = list[Exchange](), [list[int]() for _ in range(3)]
    network = Mailboxes(lambda parcel: parcel.sender != forger or parcel.ticket.leg > 0)
    for i in range(3):
        x = torch.full((64,), start)
        ctx = context(i, 7, mixing, x)
        s = initial_state(rule, mixing, x, ctx)
        x.fill_(end if i == 1 else start)
        part = Part(x, s, ctx.layout)
        setup = Setup(rule, codec, network.transport(i), part, 0, declined=declined[i].append)
        exchanges.append(begin(setup, mixing, ctx))
        network.xs.append(x)
    return network, exchanges, declined


def forged(network: MemoryNetwork) -> None:
    """What was held back arrives, with infinities in place of its numbers."""
    for held in list(network.held):
        frames = (torch.full_like(frame, torch.inf) if frame.is_floating_point() else frame for frame in held.frames)
        network.held[network.held.index(held)] = parcel = Parcel(*held[:3], tuple(frames))
        network.release(parcel)


class AsksFirst(MemoryTransport):
    """A transport that asks whether a message is sound before it counts at either end."""

    def expect(self, ticket: Ticket, peer: int, like: Sequence[Tensor], sound: Sound | None = None) -> None:
        assert sound is not None
        self.sound = sound
        super().expect(ticket, peer, like)


@pytest.mark.parametrize("codec", [exact(), int8(), topk()], ids=["exact", "int8", "topk"])
def test_a_payload_that_is_not_finite_is_unsound_before_either_end_counts_it(codec: Codec) -> None:
    network, mixing, x, rule = (
        MemoryNetwork(2),
        make_topology("complete", 2, seed=0).mixing(0),
        torch.ones(64),
        gasloc(),
    )
    transport, ctx = AsksFirst(network, 0), context(0, 7, mixing, x)
    setup = Setup(rule, codec, transport, Part(x, initial_state(rule, mixing, x, ctx), ctx.layout), 0)
    begin(setup, mixing, ctx).post()
    frames = network.take(Ticket(7), 0, 1)
    assert transport.sound(frames)
    assert not transport.sound([torch.full_like(one, torch.inf) if one.is_floating_point() else one for one in frames])


@pytest.mark.parametrize("codec", [exact(), int8()], ids=["exact", "int8"])
@pytest.mark.parametrize("rule", [gasloc(), robust(diloco()), diloco()], ids=["with peers", "robust", "through owners"])
def test_a_payload_that_is_not_finite_is_declined_and_the_others_continue_without_it(rule: Rule, codec: Codec) -> None:
    network, exchanges, declined = begun(rule, codec, 1.0, 2.0, forger=1)
    serially(lambda exchange: exchange.post(), exchanges)
    forged(network)
    finish_all(exchanges, serially)  # the forger owns a chunk of a mean as well
    assert declined[0] == [1] and declined[2] == [1]
    # Of a mean through owners the forger still owns its chunk, the middle one.
    others = slice(0, 21) if rule.averages else slice(None)
    assert torch.equal(network.xs[0], network.xs[2]) and torch.equal(network.xs[0][others], torch.ones(64)[others])


@pytest.mark.parametrize("codec", [pytest.param(codec, id=name) for name, codec in VARIANTS.items()])
def test_whatever_bytes_come_in_place_of_a_payload_are_a_finite_message_or_declined(codec: Codec) -> None:
    draw, layout = torch.Generator().manual_seed(3), Layout((Leaf("a", (6000,), 0, 6000),), 6000)
    form = MessageForm(codec, layout, torch.zeros(6000), seed=0, worker=0, device=torch.device("cpu"))
    fit = fitted(codec, layout)
    payload = encode(fit, torch.randn(6000, generator=draw), 5)
    sent = leaves(payload)
    for turn in range(12):
        # Some bytes of each tensor are drawn, or all of them, or all bits are set, which no encoder writes.
        frames = [t.reshape(-1).view(torch.uint8).clone() for t in sent]
        for frame in frames:
            drawn = torch.randint(0, 256, frame.shape, generator=draw, dtype=torch.uint8)
            place = torch.rand(frame.shape, generator=draw) < (0.01, 0.2, 1.0)[turn % 3]
            frame[place] = drawn[place] if turn % 4 else 255
        changed = [frame.view(t.dtype).view(t.shape) for frame, t in zip(frames, sent, strict=True)]
        message, packed = _decoded(fit, refill(payload, changed), torch.zeros(6000)), wire.pack_frames(changed)
        if message is None:
            with pytest.raises(TransportError, match="what worker 2 sent is no message"):
                form.unpack(packed, 2)
        else:
            assert all_finite(message) and leaves(message)[0].shape == (6000,)
            assert torch.equal(leaves(form.unpack(packed, 2))[0], leaves(message)[0])


def test_a_codec_that_raises_an_error_without_a_message_is_declined_too() -> None:
    def decode(payload: Tensor, like: Tensor) -> Tensor:
        raise IndexError

    with pytest.raises(TransportError, match=r"codec 'exact' cannot decode it \(IndexError\)"):
        decode_received(exact()._replace(decode=decode), (torch.zeros(1),), torch.zeros(1))


@pytest.mark.parametrize("rule", [choco(), sgp()], ids=repr)
def test_a_rule_that_cannot_do_without_a_message_ends_with_the_name_of_its_sender(rule: Rule) -> None:
    network, exchanges, _ = begun(rule, exact(), 1.0, 2.0, forger=1)
    serially(lambda exchange: exchange.post(), exchanges)
    forged(network)
    for receiver in (0, 2):
        with pytest.raises(TrainingError, match=r"^the message of worker 1 in round 7 has numbers"):
            exchanges[receiver].receive()


def test_a_sum_that_is_not_finite_ends_the_others_with_the_name_of_its_owner() -> None:
    network, exchanges, _ = begun(diloco(), exact(), 1.0, 2.0, forger=None)
    network.deliver = lambda parcel: parcel[:2] != (Ticket(7, 0, 1), 1)
    serially(lambda exchange: exchange.post(), exchanges)
    serially(lambda exchange: exchange.advance(), exchanges)
    forged(network)
    with pytest.raises(TrainingError, match=r"^the sum of worker 1 in round 7 has numbers"):
        exchanges[0].receive()


def test_a_drift_that_is_infinite_between_two_finite_points_is_not_sent() -> None:
    network, exchanges, _ = begun(diloco(), exact(), -3e38, 3e38)
    exchanges[0].post()
    with pytest.raises(TrainingError, match=r"^the message of worker 1 in round 7 has numbers"):
        exchanges[1].post()
    assert not any(network.has(Ticket(7, 0), 1, other) for other in (0, 2))


def test_a_codec_that_makes_an_infinity_of_finite_numbers_is_noticed_after_decoding() -> None:
    _, exchanges, _ = begun(gasloc(), fp16(), 1.0, 1e6)
    with pytest.raises(TrainingError, match=r"^the message of worker 1 in round 7 has numbers"):
        drive(exchanges, serially)
    with pytest.raises(TrainingError, match=r"^the message of worker 2 in its phase 5, decoded, has numbers"):
        LoopOptions(codec=fp16()).transmit(torch.tensor([1e6]), Layout((), 1), 2, 5)


def test_a_push_that_would_poison_the_server_is_refused_and_its_state_stays() -> None:
    layout = Layout((Leaf("a", (3,), 0, 3),), 3)
    server = ServerCore(cgad(lr=2.0), torch.zeros(3), layout, ((0, 3),), [2, 2])
    server.join(1)
    before, too_far = server.model(), server.counted(1, 0, torch.full((3,), 3e38), 10)
    with pytest.raises(TrainingError, match="the state of the server after what worker 1 pushed has numbers"):
        server.push(1, too_far, 0.0)
    assert torch.equal(server.model(), before)
