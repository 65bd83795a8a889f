"""Sites that come and go: each is a world of its own processes, which are killed and started again while the others train."""

import contextlib
import copy
import itertools
import json
import os
import re
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_flat import CASES, LOCAL_STEPS, Case, Model, made, optimizer_of, outer_of, train, whole
from torch.distributed import FileStore, HashStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import init_device_mesh

import gossamer
from commands import Command, free_port, in_forks, until
from gossamer.cli import main
from gossamer.errors import GossamerError, PeerError
from gossamer.library import lane as lanes
from gossamer.library import peers as connections_of
from gossamer.library import sites
from gossamer.library.lane import Lane
from gossamer.library.peers import Common, Peers
from gossamer.library.siblings import Siblings
from gossamer.library.sites import LaneTransport
from gossamer.rounds.compatibility.combination import Combination
from gossamer.rounds.compatibility.combine import FITTING
from gossamer.rounds.compatibility.incompatibilities import combination_faults
from gossamer.rules import RULES
from gossamer.run.config.recipes import missing
from gossamer.topologies import make_topology
from gossamer.transport.contract import Ticket
from gossamer.transport.elastic.newcomer import Applicant, ask
from gossamer.transport.keys import Keys, read_peers
from gossamer.transport.processes.local import loopback
from gossamer.transport.processes.sockets import SocketTransport
from gossamer.transport.sockets import connection
from gossamer.transport.sockets.channel import Channel
from gossamer.transport.sockets.handshake import dial

TIMEOUT_S = 20.0


HEARD = list[int]()
"""Whom this process has counted in its last exchange."""
LANES = list[LaneTransport]()


def told_of_lanes(folder: Path, name: str) -> None:
    """Notes whom the lane of this process hears, and cuts its connection with site J while there is a file `cut-NAME-J`."""
    collect = LaneTransport.collect

    def is_cut(peer: int) -> bool:
        return (folder / f"cut-{name}-{peer}").exists()

    def counted(self: LaneTransport, ticket: Ticket) -> dict[int, list[torch.Tensor]]:
        came = collect(self, ticket)
        HEARD[:], LANES[:] = sorted(came), [self]
        return came

    def dialled(address: str, secret: bytes, *, whom: int, **more: Any) -> Channel:
        if is_cut(whom):
            raise OSError("the lane is cut")
        return dial(address, secret, whom=whom, **more)

    def keep_cutting() -> None:
        while True:
            time.sleep(0.05)
            for lane in LANES:
                for peer, links in [*lane._inner._links.items()]:
                    for link in [*links] if is_cut(peer) else ():
                        if link.channel is not None:
                            link.channel.close()

    LaneTransport.collect, connection.dial = counted, dialled  # type: ignore[method-assign]
    threading.Thread(target=keep_cutting, daemon=True).start()


def process_of_a_site(rank: int, words: Mapping[str, Any]) -> None:
    """Trains until the round in the file `end`, and says after each what it has."""
    torch.set_num_threads(1)
    folder, shards, site = Path(words["folder"]), words["shards"], words["site"]
    if shards > 1:
        store = FileStore(f"{folder}/world-{site}-{words['start']}", shards)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=shards)
    case = CASES[words["case"]]
    mesh = init_device_mesh("cpu", (shards,)) if shards > 1 else None
    model = made(case, None if words["in_parts"] else mesh)
    if words[
        "in_parts"
    ]:  # each process trains a model of its own, as stages of a pipeline do, without a word to the other
        for p in [p for p in model.parameters() if p.requires_grad][rank::shards]:
            p.requires_grad_(False)
    optimizer = optimizer_of(case, model)
    options = {"elastic": True, "mesh": mesh, "rest": "own", "timeout_s": TIMEOUT_S, **words.get("options", {})}
    name = f"{site}.{rank}"
    told_of_lanes(folder, name)
    try:
        outer = outer_of(case, model, site=(site, words["sites"]), join=words["join"], **options)
        os.write(1, f"{name} pid {os.getpid()}\n".encode())
        end, saved = folder / "end", folder / f"saved-{name}.pt"
        if saved.exists():
            state = torch.load(saved, weights_only=False)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            outer.load_state_dict(state["outer"])
        turns = [outer.shard] if shards > 1 else [0, 1]
        while not end.exists() or outer.rounds < int(end.read_text()):
            step = outer.steps_taken
            train(case, model, optimizer, outer, turns, range(step, step + 1))
            if not outer.steps:
                os.write(1, f"{name} heard {','.join(map(str, HEARD))} round {outer.rounds}\n".encode())
            if outer.steps_taken == words.get("save"):
                torch.save(
                    {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "outer": outer.state_dict()},
                    saved,
                )
                os.write(1, f"{name} saved\n".encode())
        torch.save(whole(model), folder / f"end-{name}.pt")
        outer.close()
    except GossamerError as error:
        os.write(1, f"{name} {type(error).__name__}: {error}\n".encode())
        os._exit(3)


def a_site(argv: list[str]) -> int:
    words = json.loads(argv[0])
    return in_forks(words["shards"], lambda rank: process_of_a_site(rank, words))


class Sites:
    """The sites of a run."""

    def __init__(self, folder: Path, sites: int, case: str, shards: int = 2, **words: Any) -> None:
        self.folder, self.join = folder, f"127.0.0.1:{free_port()}"
        self.words = {
            "folder": str(folder),
            "sites": sites,
            "case": case,
            "shards": shards,
            "join": self.join,
            "in_parts": False,
            **words,
        }
        self.starts, self.running = 0, dict[int, Command]()
        self.said = dict[int, list[str]]()
        self.commands = list[Command]()
        self.pids = dict[tuple[int, int], int]()

    def start(self, *sites: int, **words: Any) -> None:
        for site in sites:
            self.starts += 1
            said = {**self.words, "site": site, "start": self.starts, **words}
            key = {"GOSSAMER_KEY": str(self.folder / f"{site}.pem")} if "keys" in self.words else {}
            self.running[site] = Command(json.dumps(said), work=a_site, GLOO_SOCKET_IFNAME=loopback(), **key)
            self.commands.append(self.running[site])
            self.said[site] = []

    def until(self, site: int, pattern: str) -> re.Match[str]:
        """Waits until a site says something."""
        for line in self.running[site].lines():
            self.said[site].append(line)
            if pid := re.match(r"(\d+)\.(\d+) pid (\d+)", line):
                self.pids[int(pid[1]), int(pid[2])] = int(pid[3])
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"site {site} ended without {pattern}: {''.join(self.said[site])}")

    def until_round(self, site: int, round: int) -> int:
        while (now := int(self.until(site, r"\.0 heard \S* round (\d+)")[1])) < round:
            pass
        return now

    def goes_on(self, site: int) -> int:
        """The round of a site, once it has come to the end of a few more."""
        return self.until_round(site, self.newest_round(site) + 3)

    def newest_round(self, site: int) -> int:
        return max(int(round) for round in re.findall(r"round (\d+)\n", "".join(self.running[site]._output)))

    def comes_back(self, site: int) -> int:
        """Starts a site again; the round after which all its processes have taken another's state."""
        self.start(site)
        after = {
            int(self.until(site, r"continues with the state of site \d after round (\d+)")[1])
            for _ in range(self.words["shards"])
        }
        assert len(after) == 1
        self.until_round(site, after.copy().pop() + 1)
        return after.pop()

    def end_soon(self, sites: Collection[int] = ()) -> None:
        """Lets all end, or those that are left, after a round that none has come to."""
        scratch = self.folder / "scratch"
        scratch.write_text(str(max(map(self.newest_round, sites or self.running)) + 12))
        scratch.rename(self.folder / "end")

    def cut(self, site: int, shard: int, other: int) -> None:
        """Lets the lane of one process of a site lose its connection with another site, and find none again."""
        for one, peer in ((site, other), (other, site)):
            (self.folder / f"cut-{one}.{shard}-{peer}").touch()

    def mend(self, site: int, shard: int, other: int) -> None:
        for one, peer in ((site, other), (other, site)):
            (self.folder / f"cut-{one}.{shard}-{peer}").unlink()

    def ended(self, *sites: int) -> None:
        for site in sites:
            code, output = self.running[site].finish()
            assert code == 0, f"site {site}: {output}"

    def weights(self, site: int, shard: int = 0) -> dict[str, torch.Tensor]:
        return torch.load(self.folder / f"end-{site}.{shard}.pt")

    def killed(self, site: int, shard: int | None = None) -> None:
        """Kills one process of a site, whose launcher ends the others then, or all at once."""
        if shard is None:
            self.running[site].kill()
        else:
            while (site, shard) not in self.pids:
                self.until(site, "pid")
            os.kill(self.pids.pop((site, shard)), signal.SIGKILL)
        assert self.running[site].finish()[0] != 0


@pytest.fixture
def sites_of(tmp_path: Path) -> Iterator[Callable[..., Sites]]:
    made = list[Sites]()

    def sites(*args: Any, **words: Any) -> Sites:
        made.append(Sites(tmp_path, *args, **words))
        return made[-1]

    yield sites
    for one in made:
        for command in one.commands:
            command.kill()
            command.finish(1)


def test_the_death_of_a_shard_or_of_the_first_site_is_survived_and_all_shards_of_a_site_come_back_at_one_round(
    sites_of: Callable[..., Sites],
) -> None:
    run = sites_of(3, "diloco, adamw", in_parts=True)
    run.start(0, 1, 2)
    run.until_round(0, 2)
    run.killed(2, shard=1)
    run.goes_on(0)
    run.comes_back(2)
    run.killed(0)
    run.goes_on(1)
    run.comes_back(0)
    run.goes_on(1)
    run.end_soon()
    run.ended(0, 1, 2)
    for shard in range(2):  # a mean over everyone leaves all of them equal
        for name, one in run.weights(0, shard).items():
            assert all(torch.equal(one, run.weights(site, shard)[name]) for site in (1, 2)), (shard, name)


@pytest.mark.full
def test_a_site_that_gossips_continues_alone_and_takes_the_first_site_in_again(sites_of: Callable[..., Sites]) -> None:
    run = sites_of(2, "gasloc, sgd")
    run.start(0, 1)
    run.until_round(0, 2)
    run.killed(0)
    run.goes_on(1)
    run.comes_back(0)
    run.goes_on(1)
    run.end_soon()
    run.ended(0, 1)
    apart = max(float((one - run.weights(1)[name]).abs().max()) for name, one in run.weights(0).items())
    assert 0 < apart < 0.1


def heard_by(run: Sites, site: int, shard: int) -> list[tuple[str, str]]:
    """Whom a process has counted in which round."""
    return re.findall(rf"{site}\.{shard} heard (\S*) round (\d+)", "".join(run.running[site]._output))


@pytest.mark.full
def test_a_lane_that_is_cut_keeps_an_exchange_from_all_shards_of_both_sites_until_it_is_whole(
    sites_of: Callable[..., Sites],
) -> None:
    run = sites_of(2, "gasloc, sgd", options={"timeout_s": 3.0})
    run.start(0, 1)
    run.until_round(0, 2)
    run.cut(0, 1, 1)
    run.until(0, r"0\.0 heard  round")
    run.goes_on(0)
    run.mend(0, 1, 1)
    run.until(0, r"0\.0 heard 1 round")
    run.end_soon()
    run.ended(0, 1)
    for site in range(2):
        assert heard_by(run, site, 0) == heard_by(run, site, 1) != []


@pytest.mark.full
@pytest.mark.parametrize("others", [(0, 1), (1,)])
def test_a_site_leaves_whose_lane_is_cut_so_that_the_others_can_close_a_mean(
    sites_of: Callable[..., Sites], others: tuple[int, ...]
) -> None:
    run = sites_of(3, "diloco, adamw", in_parts=True, options={"timeout_s": 3.0})
    run.start(0, 1, 2)
    run.until_round(0, 2)
    for other in others:
        run.cut(2, 1, other)
    code, output = run.running[2].finish()
    assert code and len(re.findall(r"2\.\d PeerError: site 2 has not heard site .*1 for 3 s or longer", output)) == 2
    run.goes_on(0)
    run.end_soon({0, 1})
    run.ended(0, 1)


@pytest.mark.full
def test_a_shard_that_stands_still_holds_up_its_site_alone_which_then_takes_the_others_state(
    sites_of: Callable[..., Sites],
) -> None:
    run = sites_of(3, "diloco, adamw", in_parts=True, options={"timeout_s": 6.0})
    run.start(0, 1, 2)
    run.until_round(2, 2)
    os.kill(run.pids[2, 1], signal.SIGSTOP)
    run.until_round(0, run.newest_round(0) + 2)  # its sibling waits for it three times as long as the other sites
    with contextlib.suppress(ProcessLookupError):
        os.kill(run.pids[2, 1], signal.SIGCONT)
    try:
        after = [int(run.until(2, r"continues with the state of site \d after round (\d+)")[1]) for _ in range(2)]
    except AssertionError:  # on a busy machine its sibling may have given it up before
        assert "another process of worker 2 is gone, or did not come in time" in "".join(run.said[2])
        after = [run.comes_back(2)] * 2
    assert after[0] == after[1]
    run.until_round(2, after[0] + 2)  # else the others may end while it still takes their state
    run.end_soon()
    run.ended(0, 1, 2)
    for shard in range(2):
        for name, one in run.weights(0, shard).items():
            assert all(torch.equal(one, run.weights(site, shard)[name]) for site in (1, 2)), (shard, name)


@pytest.mark.full
def test_a_mean_over_half_of_the_sites_waits_for_the_other_half_to_come_back(sites_of: Callable[..., Sites]) -> None:
    run = sites_of(2, "diloco, adamw", shards=1)
    run.start(0, 1)
    run.until_round(0, 2)
    run.killed(1)
    after = run.comes_back(1)
    assert run.goes_on(0) - after < 30
    run.goes_on(0)
    run.end_soon()
    run.ended(0, 1)
    assert all(torch.equal(one, run.weights(1)[name]) for name, one in run.weights(0).items())


def test_losses_of_the_sites_that_are_alive_are_received_without_waiting_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sites, "_LOOK_S", 0.05)
    for elastic in (False, True):
        _, outers = begun(2, rule="gossip", elastic=elastic)
        assert outers[0].losses(0.5) == {0: 0.5}, "the other has said nothing"
        deadline = time.monotonic() + 20
        while (heard := outers[1].losses(float("inf"))) != {0: 0.5, 1: float("inf")}:
            assert time.monotonic() < deadline, heard
        assert outers[0].losses(0.25) == {0: 0.25}, "what is not finite is not told"
        outers[1].close()
        if elastic:
            outers[0].step()
            assert outers[0].losses(0.125) == {0: 0.125}
        with pytest.raises(GossamerError, match="losses got mine = 'low'"):
            outers[0].losses("low")  # type: ignore[arg-type]
        outers[0].close()


# --- bits -------------------------------------------------------------------------------------------------------------


def in_threads(*acts: Callable[[], Any]) -> list[Any]:
    """Sites of one process need no world, so threads can be some."""
    with ThreadPoolExecutor(len(acts)) as pool:
        return [future.result(200) for future in [pool.submit(act) for act in acts]]


def fixed_and_elastic(rank: int, case: Case, folder: Path, joins: list[str]) -> None:
    """A process of two sites of two: of a fixed number, then elastic and saved within a round, then continued from there."""
    torch.set_num_threads(1)
    site, shard = divmod(rank, 2)
    dist.init_process_group("gloo", store=FileStore(f"{folder}/world-{site}", 2), rank=shard, world_size=2)
    mesh, met = init_device_mesh("cpu", (2,)), iter(joins)
    saved = dict[str, Any]()
    steps, until = LOCAL_STEPS * case.rounds, LOCAL_STEPS + 2
    for kind in ("fixed", "elastic", "resumed"):
        model = made(case, mesh)
        optimizer = optimizer_of(case, model)
        with outer_of(case, model, site=(site, 2), join=next(met), elastic=kind != "fixed") as outer:
            if kind == "resumed":
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
                outer.load_state_dict(saved["outer"])
            train(case, model, optimizer, outer, [shard], range(outer.steps_taken, until))
            saved = copy.deepcopy(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "outer": outer.state_dict()}
            )
            train(case, model, optimizer, outer, [shard], range(until, steps))
            outer.finish()
            torch.save(whole(model), folder / f"{kind}-{rank}.pt")


def two_sites(argv: list[str]) -> int:
    return in_forks(4, lambda rank: fixed_and_elastic(rank, CASES[argv[0]], Path(argv[1]), argv[2:]))


def whole_site(case: Case, model: Model, site: int, join: str) -> dict[str, torch.Tensor]:
    """A site of one process, which sees the samples of two as halves of a batch."""
    with outer_of(case, model, site=(site, 2), join=join) as outer:
        train(case, model, optimizer_of(case, model), outer, [0, 1], range(LOCAL_STEPS * case.rounds))
        return whole(model)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["diloco, adamw", "gasloc, sgd"])
def test_elastic_sites_that_all_stay_end_with_the_bits_of_fixed_ones_and_of_sites_of_one_process(
    tmp_path: Path, name: str
) -> None:
    *joins, join = [f"127.0.0.1:{free_port()}" for _ in range(4)]
    sharded = Command(name, tmp_path, *joins, work=two_sites, GLOO_SOCKET_IFNAME=loopback())
    one = in_threads(*[partial(whole_site, CASES[name], made(CASES[name]), site, join) for site in range(2)])
    code, output = sharded.finish()
    assert code == 0, output
    for kind in ("fixed", "elastic", "resumed"):
        for rank in range(4):
            found, expected = torch.load(tmp_path / f"{kind}-{rank}.pt"), one[rank // 2]
            assert [key for key in expected if not torch.equal(found[key], expected[key])] == [], (kind, rank)


def with_optimizer_states_in_parts(rank: int, folder: Path, joins: list[str]) -> None:
    """A process of two sites of two copies each, with AdamW and then with torch's ZeRO-1 around it."""
    with warnings.catch_warnings(action="ignore"):  # of torch's own imports
        from torch.distributed.optim import ZeroRedundancyOptimizer
    torch.set_num_threads(1)
    site, shard = divmod(rank, 2)
    dist.init_process_group("gloo", store=FileStore(f"{folder}/world-{site}", 2), rank=shard, world_size=2)
    for kind, join in zip(("whole", "parts"), joins, strict=True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        replicated = torch.nn.parallel.DistributedDataParallel(model)
        if kind == "whole":
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        else:
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
        draw = torch.Generator().manual_seed(rank)
        with gossamer.Outer(model, "diloco", local_steps=3, site=(site, 2), join=join, timeout_s=60) as outer:
            for _ in range(9):
                replicated(torch.randn(8, 4, generator=draw)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                outer.step()
            assert (outer.n, outer.rounds) == (2, 3)
        torch.save(model.state_dict(), folder / f"{kind}-{rank}.pt")


def four_copies(argv: list[str]) -> int:
    return in_forks(4, lambda rank: with_optimizer_states_in_parts(rank, Path(argv[0]), argv[1:]))


@pytest.mark.full
def test_sites_whose_optimizer_is_torchs_zero_1_end_with_the_bits_of_those_with_the_whole_state(tmp_path: Path) -> None:
    joins = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    code, output = Command(tmp_path, *joins, work=four_copies, GLOO_SOCKET_IFNAME=loopback()).finish()
    assert code == 0, output
    first, *others = [torch.load(tmp_path / f"{kind}-{rank}.pt") for kind in ("whole", "parts") for rank in range(4)]
    assert all(torch.equal(t, other[name]) for other in others for name, t in first.items())


# --- with keys --------------------------------------------------------------------------------------------------------


@pytest.fixture
def peers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A file of two peers, whose keys are in 0.pem and 1.pem, beside that of a stranger."""
    pytest.importorskip("cryptography")
    for name in ("0", "1", "stranger"):
        assert main(["keys", "new", f"site-{name}", "--out", str(tmp_path / f"{name}.pem")]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "peers.toml").write_text(printed[: printed.index("[peers.site-stranger]")])
    return tmp_path / "peers.toml"


@pytest.mark.parametrize("elastic", [True, False])
def test_sites_with_keys_have_the_bits_of_those_without_and_every_connection_between_them_is_encrypted(
    peers: Path, monkeypatch: pytest.MonkeyPatch, elastic: bool
) -> None:
    def trained(keyed: Path | None, join: str, site: int) -> list[torch.Tensor]:
        model = torch.nn.Linear(3, 2)
        torch.nn.init.ones_(model.weight)
        torch.nn.init.constant_(model.bias, site)
        model.register_buffer("frozen", torch.full((2, 2), float(site)))
        options = {"timeout_s": TIMEOUT_S, "elastic": elastic, "site": (site, 2), "join": join, "peers": keyed}
        with gossamer.Outer(model, "diloco", local_steps=1, rest="broadcast", **options) as outer:
            for step in range(3):
                if step == 2:  # before the last round, after which the other may have left
                    transport = outer._peers.transport
                    if isinstance(transport, SocketTransport):
                        links = [peer.connection for peer in transport._peers.values()]
                    else:  # of sites that stay, gloo carries what is not encrypted
                        inner = None if outer._site is None else outer._site._inner
                        links = [] if inner is None else [link for some in inner._links.values() for link in some]
                    shown = [link.channel.certificate is not None for link in links if link.channel is not None]
                    assert bool(shown) is (elastic or keyed is not None) and all(
                        one is (keyed is not None) for one in shown
                    )
                with torch.no_grad():
                    model.weight += 0.1 * (1 + site + step)
                outer.step()
            outer.finish()
        assert not any(buffer.any() for buffer in model.buffers()), "those of site 0"
        return [p.detach().clone() for p in model.parameters()]

    # Both sites are threads of this process, so each is given its key by hand.
    monkeypatch.setattr(
        "gossamer.library.outer.keys_of_sites",
        lambda file, site: file and Keys(peers.parent / f"{site[0]}.pem", read_peers(file), 2),
    )
    for_each = [[partial(trained, keyed, f"127.0.0.1:{free_port()}")] for keyed in (None, peers)]
    plain, keyed = (in_threads(*(partial(one, site) for site in range(2))) for (one,) in for_each)
    assert all(
        torch.equal(a, b) for ours, theirs in zip(plain, keyed, strict=True) for a, b in zip(ours, theirs, strict=True)
    )


@pytest.mark.full
def test_with_keys_the_first_site_dies_and_comes_back_and_one_without_the_right_key_is_refused(
    peers: Path, sites_of: Callable[..., Sites]
) -> None:
    run = sites_of(2, "gasloc, sgd", keys=True, options={"peers": str(peers)})
    run.start(0, 1)
    run.until_round(0, 2)
    run.killed(0)
    run.goes_on(1)
    (peers.parent / "0.pem").rename(peers.parent / "kept.pem")
    (peers.parent / "stranger.pem").rename(peers.parent / "0.pem")
    run.start(0)
    run.until(0, r"ConfigError: the key .* is none of the run's \[peers\]")
    run.running[0].finish()
    (peers.parent / "kept.pem").rename(peers.parent / "0.pem")
    run.comes_back(0)
    run.goes_on(1)
    run.end_soon()
    run.ended(0, 1)


def test_peers_that_do_not_fit_the_sites_are_refused_in_a_sentence(
    peers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    join = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("GOSSAMER_KEY", str(peers.parent / "0.pem"))
    assert "neither can encrypt" in refusal(
        lambda: small(0, 2, join, peers=peers, elastic=False, reduction="all_reduce")
    )
    assert "has [peers] for 2 sites and there are 3" in refusal(lambda: small(0, 3, join, peers=peers))
    assert "with the workers 0, and this process is worker 1" in refusal(lambda: small(1, 2, join, peers=str(peers)))
    assert "are not a file" in refusal(lambda: small(0, 2, join, peers="nowhere.toml"))


def test_a_key_is_given_no_slot_of_another_site_and_nobody_is_taken_for_the_site_that_the_board_calls_him(
    peers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = read_peers(peers)
    keys = [Keys(peers.parent / f"{site}.pem", file, 2) for site in range(2)]
    monkeypatch.setattr("gossamer.library.outer.keys_of_sites", lambda file, site: keys[site[0]])
    _, outers = begun(2, peers=peers)
    assert outers[0]._site is not None
    first, members = outers[0]._site, outers[0]._site._inner.members
    entries = members.entries
    outers[1].close()
    asked = partial(ask, run=first._endpoint.run, limits=members.limits, timeout_s=4.0, state=False)
    stolen = Applicant(7, "127.0.0.1:9", wants=1)
    with pytest.raises((PeerError, OSError)):
        asked(entries[0].address, b"", stolen, keys=keys[0], whom=0)
    assert entries[1].nonce != 7
    # Site 0 is no site 1, whatever the board says.
    with pytest.raises(PeerError, match="calls itself worker 1, which its key may not be"):
        asked(entries[0].address, b"", stolen, keys=keys[1], whom=1)
    offer = asked(entries[0].address, b"", stolen, keys=keys[1], whom=0)
    assert (offer.slot, offer.donor, entries[1].nonce) == (1, 0, 7), "its own key gets it"
    outers[0].close()


def _awaited(outer: gossamer.Outer[Any]) -> Set[int]:
    """The sites with which this one would close a round."""
    assert outer._site is not None and outer._site._inner.closing is not None
    return outer._site._inner.closing._present


@pytest.mark.parametrize(
    ("sites", "spoilt", "why"),
    [
        (3, lambda x: torch.zeros(3), "a tensor of (3,)"),
        (4, lambda x: x + 1, "1 of 3 workers have this state after round 1"),
    ],
    ids=["that does not fit", "that no other site has"],
)
def test_a_site_that_comes_back_does_not_take_a_state_and_asks_another(
    sites: int, spoilt: Callable[[torch.Tensor], torch.Tensor], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    join, outers = begun(sites)
    back = sites - 1
    outers.pop().close()
    assert outers[0]._site is not None
    state = outers[0]._for_others()
    outers[0]._site.keep(1, {**state, "x": spoilt(state["x"])})
    again = small(back, sites, join)
    assert not again.step(), "its first step takes a state over"
    assert f"site {back} does not take the state that site 0 gave: {why}" in caplog.text
    assert ("on its word alone" in caplog.text) == (sites == 3), "of two others neither confirms the other"
    assert f"site {back} continues with the state of site 1" in caplog.text
    assert torch.equal(again.model.weight, outers[1].model.weight)
    until(lambda: all(back in _awaited(outer) for outer in outers))  # until then they may close a round without it
    assert in_threads(*(outer.step for outer in (*outers, again))) == [True] * sites
    for outer in (*outers, again):
        outer.close()


def test_sites_that_end_stay_until_one_that_their_last_round_was_closed_without_has_their_state(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, outers = begun(3, timeout_s=6.0)
    late = outers.pop()
    in_threads(*(outer.step for outer in outers))
    for outer in outers:
        assert outer._site is not None
        outer._site._inner.core.limit_s = 200.0
    stays = "worker {} stays for 200 s at most, so that worker 2 can take its state: the last round was closed"
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(outer.close) for outer in outers]
        until(lambda: [caplog.text.count(stays.format(site)) for site in range(2)] == [1, 1])
        assert not late.step() and late.rounds == 2, "it takes a state over"
        for end in ends:
            end.result(100.0)
    assert torch.equal(late.model.weight, outers[0].model.weight)
    late.close()
    assert [caplog.text.count(stays.format(site)) for site in range(2)] == [1, 1]


def test_those_that_stay_at_the_end_wait_in_turns_for_one_deadline_in_all() -> None:
    _, outers = begun(3, timeout_s=4.0)
    late = outers.pop()
    in_threads(*(outer.step for outer in outers))
    assert outers[0]._site is not None
    inner, start_s = outers[0]._site._inner, time.monotonic()
    inner.stop = lambda: False
    until(lambda: bool(inner._closes().late))
    turns = 1
    while inner.stay_for_late(0.5):
        turns += 1
    assert turns > 2 and time.monotonic() - start_s > inner.core.limit_s
    assert not inner.stay_for_late(0.5), "the deadline is over"
    for outer in (*outers, late):
        outer.close()


# --- what is refused, and in which words ------------------------------------------------------------------------------


Begun = tuple[str, list[gossamer.Outer[Any]]]


def small(site: int, sites: int, join: str, rule: str = "diloco", **options: Any) -> gossamer.Outer[Any]:
    options = {"local_steps": 1, "timeout_s": 20.0, "elastic": True, **options}
    return gossamer.Outer(torch.nn.Linear(3, 2), rule, site=(site, sites), join=join, **options)


def begun(sites: int, **options: Any) -> Begun:
    """Sites of one process that have closed their first round, and where they meet."""
    join = f"127.0.0.1:{free_port()}"
    outers = in_threads(*(partial(small, site, sites, join, **options) for site in range(sites)))
    in_threads(*(outer.step for outer in outers))
    return join, outers


def refusal(act: Callable[[], Any]) -> str:
    with pytest.raises(GossamerError) as error:
        act()
    return str(error.value)


@pytest.fixture
def two() -> Iterator[Begun]:
    """Two sites of one process that have begun."""
    join, outers = begun(2, codec="bf16")
    yield join, outers
    for outer in outers:
        outer.close()


def test_a_process_of_a_site_that_ends_alone_says_that_it_waits_for_no_late_site(
    two: Begun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(*given: Any) -> list[int]:
        raise PeerError("another process of worker 0 is gone")

    monkeypatch.setattr(two[1][0]._siblings, "from_first", gone)
    two[1][0].close()
    assert "site 0 ends without waiting for sites that may be late: another process of worker 0 is gone" in caplog.text


def test_a_site_that_is_there_is_refused_in_a_sentence_and_disturbs_nobody(two: Begun) -> None:
    join, outers = two
    assert f"site 1 of 2 is at '{join}' already" in refusal(lambda: small(1, 2, join, codec="bf16", timeout_s=1.5))
    assert "where another process does" in refusal(lambda: small(0, 2, join, codec="bf16"))
    in_threads(*(outer.step for outer in outers))
    assert [outer.rounds for outer in outers] == [2, 2]


def test_a_program_at_the_address_that_never_answers_is_named_within_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        join = f"127.0.0.1:{other.getsockname()[1]}"
        said = refusal(lambda: small(1, 2, join, timeout_s=0.5))
    assert f"could not reach site 0 at '{join}' (what listens there did not answer as a store within 0.5 s)" in said


def test_what_another_run_has_in_common_is_compared_when_a_site_comes_back(
    two: Begun, monkeypatch: pytest.MonkeyPatch
) -> None:
    join, outers = two
    outers[1].close()
    assert f"site 1 of 3 is at '{join}', where another run is, of 2 sites" in refusal(lambda: small(1, 3, join))
    assert "where another run is, of 2 sites that come and go, and not one of 2 sites that all stay" in refusal(
        lambda: small(1, 2, join, elastic=False)
    )
    assert "differ" in (said := refusal(lambda: small(1, 2, join))) and "codec" in said and "is in progress" in said
    mesh = refusal(
        lambda: gossamer.Outer(
            torch.nn.Linear(4, 2),
            "diloco",
            local_steps=1,
            timeout_s=4,
            site=(1, 2),
            join=join,
            elastic=True,
            codec="bf16",
        )
    )
    assert "differ" in mesh and "in model" in mesh
    monkeypatch.setenv("GOSSAMER_SECRET", "somebody else's secret of 32 chars")
    assert "does not carry the code of this run's secret" in refusal(lambda: small(1, 2, join, codec="bf16"))


def test_a_site_with_another_number_of_processes_is_refused_when_it_comes_back(two: Begun) -> None:
    join, outers = two
    outers[1].close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lane, "shards", property(lambda lane: 2))
        patch.setattr(Siblings, "__init__", lambda self, lane, timeout_s: alone(self, lane))
        assert "site 0 has 1 processes and site 1 2" in refusal(lambda: small(1, 2, join, codec="bf16"))


def alone(siblings: Siblings, lane: Lane) -> None:
    siblings._lane, siblings._group, siblings._width = lane, None, 99


def test_a_site_that_left_comes_back_with_the_state_of_the_others(two: Begun) -> None:
    join, outers = two
    outers[1].close()
    again = small(1, 2, join, codec="bf16")
    with torch.no_grad():
        outers[0].model.weight += 1.0
    stepping = ThreadPoolExecutor(1).submit(lambda: [outers[0].step(), outers[0].step()])
    assert not again.step() and again.rounds == 1, "its first step takes the state over"
    assert [again.step(), again.step()] == [True, True]
    assert stepping.result(30) == [True, True]
    assert torch.equal(again.model.weight, outers[0].model.weight) and again.rounds == outers[0].rounds == 3
    again.close()


def test_what_needs_all_sites_at_once_is_refused(two: Begun) -> None:
    _, outers = two
    assert "mean_model() was called with elastic=True" in refusal(lambda: outers[0].mean_model().__enter__())
    assert "a state was given after 1 rounds with elastic=True" in refusal(
        lambda: outers[0].load_state_dict(outers[0].state_dict())
    )
    assert outers[0].common_steps(7) == 7, "a site that ends before the others leaves"


@pytest.mark.parametrize(
    ("rule", "options", "sentence"),
    [
        ("diloco", {"site": None, "join": None}, "Outer got elastic=True and no site"),
        ("choco", {}, "elastic is true, and rule 'choco' keeps something of each peer"),
        ("eager", {}, "elastic is true, and rule 'eager' has exchanges in flight between rounds"),
        (
            "gasloc",
            {"schedule": gossamer.Schedule(overlap_steps=1)},
            "elastic is true, and rule 'gasloc' has exchanges in flight",
        ),
        ("diloco", {"reduction": "all_reduce"}, "elastic is true and reduction is 'all_reduce'"),
        ("diloco", {"elastic": 1}, "elastic"),
    ],
)
def test_a_method_that_elastic_runs_do_not_have_is_refused_by_its_name(
    rule: str, options: dict[str, Any], sentence: str
) -> None:
    given = {"site": (0, 2), "join": "127.0.0.1:1", "elastic": True, "local_steps": 4, **options}
    assert sentence in refusal(lambda: gossamer.Outer(torch.nn.Linear(3, 2), rule, **given))


@pytest.mark.parametrize("name", [name for name, make in RULES.items() if not missing(make)])
def test_every_rule_runs_on_elastic_sites_or_is_refused_as_in_an_elastic_run(name: str) -> None:
    rule = RULES[name]()
    topology = make_topology(FITTING[rule.needs], 4, seed=0)
    of_a_run = combination_faults(Combination(driver="train", rule=rule, topology=topology, elastic=True))
    said = combination_faults(Combination(driver="library", rule=rule, topology=topology, elastic=True))
    assert not [one for one in of_a_run if "run.elastic" in one] or [one for one in said if "elastic is true" in one]


class Carrier:
    """What carries a board, or connections, and whether it was closed."""

    def __init__(self) -> None:
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


class LostBoard:
    """A board whose process has ended."""

    def set(self, name: str, text: str) -> None:
        raise RuntimeError("the connection was reset")


def unconnected(behind: Carrier | None = None) -> Any:
    """A second site of two, without connections."""
    site, transport = object.__new__(sites.ElasticSite), object.__new__(LaneTransport)
    transport._behind, transport.closed = behind, False
    site.lane, site.transport, site._join, site._board = Lane(worker=1, sites=2), transport, "127.0.0.1:9", None
    site._endpoint, site._tell = SimpleNamespace(secret=b"", timeout_s=5.0), ("under way/1/0", "{}")
    site._inner = SimpleNamespace(members=SimpleNamespace(entries={}), changed=threading.Condition())
    return site


def test_a_site_keeps_one_connection_with_the_board_while_the_first_site_has_yet_to_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reached, site = list[tuple[HashStore, Carrier]](), unconnected(before := Carrier())

    def opened(*_: object) -> tuple[HashStore, Carrier]:
        reached.append((HashStore(), Carrier()))
        return reached[-1]

    monkeypatch.setattr(sites, "opened", opened)
    monkeypatch.setattr(sites, "_LOOK_S", 0.01)
    looks = threading.Thread(target=site._look_for_board)
    looks.start()
    until(lambda: before.is_closed)
    time.sleep(0.2)  # in which it looks some more times
    assert len(reached) == 1
    site._board.delete_key(site._tell[0])  # another process hosts the board now
    until(lambda: reached[0][1].is_closed)
    time.sleep(0.2)
    assert [carrier.is_closed for _, carrier in reached] == [True, False]
    monkeypatch.setattr(sites, "board", lambda store: LostBoard())
    site._board.delete_key(site._tell[0])
    until(lambda: len(reached) > 3)
    site.transport.closed = True
    looks.join()
    assert [carrier.is_closed for _, carrier in reached[1:3]] == [False, True]


def test_a_board_that_is_reached_as_a_site_ends_is_closed() -> None:
    site = unconnected()
    site.transport.closed = True
    site.transport.take_board(late := Carrier())
    assert late.is_closed


def fails(*_: object, **__: object) -> Any:
    raise PeerError("the others did not come")


def test_a_site_that_the_others_do_not_join_leaves_the_board(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Carrier()
    monkeypatch.setattr(lanes, "opened", lambda *_: (HashStore(), board))
    monkeypatch.setattr(lanes, "claim_site", fails)
    with pytest.raises(PeerError):
        lanes.join_sites(Lane(worker=1, sites=2), "127.0.0.1:9", 5.0)
    assert board.is_closed


def test_an_elastic_site_that_gets_no_parameters_to_start_from_ends_its_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connections, listeners = Carrier(), list[socket.socket]()
    begins = SimpleNamespace(run="a run")
    monkeypatch.setattr(
        sites,
        "_Rendezvous",
        lambda *_: SimpleNamespace(start_or_donor=lambda: [0], all_start=lambda: begins, run_key=lambda run: 1),
    )

    def made(begins: object, siblings: object, endpoint: Any, *_: object, **__: object) -> Any:
        listeners.append(endpoint.listener)
        return SimpleNamespace(transport=connections, come_to_board=lambda: None, start_from_first=fails)

    monkeypatch.setattr(sites, "ElasticSite", made)
    common = Common(*["x"] * 6, "own", "x", "x")
    siblings: Any = SimpleNamespace(from_first=lambda choose, what: choose())
    with pytest.raises(PeerError):
        sites.elastic_site(
            Lane(worker=1, sites=2, address="127.0.0.1"),
            siblings,
            common,
            "127.0.0.1:9",
            torch.zeros(2),
            {},
            SimpleNamespace(sends_per_round=1),  # type: ignore[arg-type]
            closings=1,
            timeout_s=5.0,
        )
    assert connections.is_closed and listeners[0].fileno() == -1


def test_a_process_ends_its_connections_where_another_of_its_site_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others would take it for alive, and its address would stay in use for the life of the process."""
    board, connections, meetings = Carrier(), Carrier(), itertools.count()

    @contextlib.contextmanager
    def all_or_none(operation: str) -> Iterator[None]:
        yield
        if next(meetings):
            raise PeerError("the start of Outer failed in another process")

    monkeypatch.setattr("gossamer.library.outer.at_board", lambda lane, *_: lane._replace(behind=board))
    outer: Any = object.__new__(gossamer.Outer)
    outer._lane, outer._timeout_s = Lane(worker=1, sites=2), 5.0
    outer._siblings = SimpleNamespace(all_or_none=all_or_none)
    outer._connected, outer._new_loop = lambda *_: connections, lambda _: None
    with pytest.raises(PeerError):
        outer._meet(None, SimpleNamespace(join="127.0.0.1:9", elastic=True))
    assert board.is_closed and connections.is_closed


def test_a_process_without_memory_for_its_outer_state_ends_its_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    connections = Carrier()

    def fails(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(gossamer.Outer, "_connected", lambda *_: connections)
    monkeypatch.setattr(gossamer.Outer, "_new_loop", fails)
    with pytest.raises(MemoryError):
        gossamer.Outer(torch.nn.Linear(2, 1), "gossip")
    assert connections.is_closed


def test_fixed_sites_with_keys_that_do_not_agree_stop_listening(monkeypatch: pytest.MonkeyPatch) -> None:
    listeners, listen = list[socket.socket](), connections_of.listen

    def noted(host: str, port: int) -> socket.socket:
        listeners.append(listen(host, port))
        return listeners[-1]

    monkeypatch.setattr("gossamer.library.peers.listen", noted)
    monkeypatch.setattr("gossamer.library.peers.all_at", fails)
    keys: Any = object()
    lane = Lane(worker=1, sites=2, joint=HashStore(), address="127.0.0.1", keys=keys)
    common = Common(*["x"] * 6, "own", "x", "x")
    with pytest.raises(PeerError):
        Peers.of(None, lane, common, torch.zeros(2), {}, timeout_s=5.0)
    assert listeners[0].fileno() == -1
