"""Starting runs: joining, agreeing, and many workers on one machine, with real processes."""

import contextlib
import io
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from commands import Command
from gossamer.cli import main
from gossamer.cli.train import import_early
from gossamer.errors import ConfigError, PeerError, TransportError
from gossamer.transport.contract import Ticket
from gossamer.transport.processes import launch, local
from gossamer.transport.processes.group import GroupTransport
from gossamer.transport.processes.launch import (
    agree,
    join,
    late_to_part,
    launched,
    leave,
    one_device,
    raise_descriptor_limit,
)
from gossamer.transport.processes.local import run_local, run_served
from gossamer.transport.processes.member import Member
from gossamer.transport.processes.store import ENTRY_BYTES, Entries

LIMIT_S = 60.0
"""How long a busy machine may take for what takes an idle one a moment."""
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}

pytestmark = pytest.mark.usefixtures("forks")


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of worker 1 of 2, whose store nobody serves."""
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_a_process_that_cannot_join_leaves_a_store_that_it_has_reached_by_its_key(torchrun: pytest.MonkeyPatch) -> None:
    closed = list[bool]()
    behind = SimpleNamespace(close=lambda: closed.append(True))
    keys: Any = SimpleNamespace(numbers=lambda certificate: [1], certificate=b"")
    torchrun.setattr(launch, "_store", lambda *_: (HashStore(), behind))
    with pytest.raises(PeerError, match="worker 0 did not come within"):
        join(2, timeout_s=0.2, group=False, keys=keys)
    assert closed


def test_a_launcher_that_reports_a_failed_worker_to_other_machines_keeps_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, closed = HashStore(), list[bool]()
    behind = SimpleNamespace(close=lambda: closed.append(True))
    monkeypatch.setattr(local, "meeting_store", lambda *_, **__: (store, behind))
    monkeypatch.setattr(local, "_children", lambda *_: contextlib.nullcontext())
    with local._workers([], main, [], b"", local.Among(2, 4, "127.0.0.1", 9)) as (_, report):
        report("2", 1)
    assert closed and store.num_keys() == 1


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_process_without_a_launcher_is_refused_with_the_launch_command(torchrun: pytest.MonkeyPatch, name: str):
    torchrun.delenv(name)
    with pytest.raises(ConfigError, match=f"{name} is not set.*--rank I --of N"):
        join(2, timeout_s=1.0)


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({"WORLD_SIZE": "3"}, {}, r"WORLD_SIZE \(--of\) is 3 but the run file has workers = 2"),
        ({"MASTER_PORT": "99999"}, {}, r"MASTER_PORT is '99999'; it must be a port, at most 65535"),
        ({"RANK": "2"}, {}, r"RANK \(--rank\) is 2; .* between 0 and 1"),
        ({"RANK": "-1"}, {}, "RANK is '-1'"),
        ({}, {"backend": "mpi"}, "run.backend is 'mpi'; allowed: auto, gloo, nccl"),
        ({}, {"device": "tpu"}, "run.device is 'tpu'; allowed: auto, cpu, cuda"),
        ({}, {"backend": "nccl", "device": "cpu"}, "run.backend is 'nccl'"),
    ],
)
def test_an_environment_that_does_not_fit_is_refused(
    torchrun: pytest.MonkeyPatch, changes: dict[str, str], options: dict[str, Any], words: str
):
    for name, value in changes.items():
        torchrun.setenv(name, value)
    with pytest.raises(ConfigError, match=words):
        join(2, timeout_s=1.0, **options)


@pytest.mark.parametrize(("workers", "parts"), [(1, 1), (5, 1), (3, 2), (2, 4)])
def test_every_rank_is_one_part_of_one_worker_and_with_one_part_ranks_are_workers(workers: int, parts: int):
    store, device = HashStore(), torch.device("cpu")
    members = [Member.at(rank, workers, device, store, parts) for rank in range(workers * parts)]
    assert [member.rank for member in members] == list(range(workers * parts))
    assert {(m.worker, m.part) for m in members} == {(w, p) for w in range(workers) for p in range(parts)}
    for member in members:
        peers = [members[member.rank_of(worker)] for worker in range(workers)]
        assert [peer.worker for peer in peers] == list(range(workers))
        assert {peer.part for peer in peers} == {member.part}
        assert parts > 1 or member.rank == member.worker


@pytest.mark.parametrize("world", ["2", "3", "5"])
def test_a_world_that_is_no_whole_number_of_workers_is_refused(torchrun: pytest.MonkeyPatch, world: str):
    torchrun.setenv("WORLD_SIZE", world)
    with pytest.raises(
        ConfigError, match=rf"WORLD_SIZE \(--of\) is {world} .* workers = 2 of 2 processes each; start 4 processes"
    ):
        join(2, parts=2, timeout_s=1.0)


def test_a_store_that_cannot_be_reached_is_named(torchrun: pytest.MonkeyPatch):
    with pytest.raises(TransportError, match=r"worker 1 could not reach the store at 127\.0\.0\.1:1 within 1 s"):
        join(2, device="cpu", threads=1, timeout_s=1.0)


def test_workers_that_do_not_come_are_named(torchrun: pytest.MonkeyPatch):
    torchrun.setenv("RANK", "0")  # serves the store itself
    torchrun.setenv("MASTER_PORT", "0")
    with pytest.raises(PeerError, match="worker 1 did not come within 1 s"):
        join(2, device="cpu", threads=1, timeout_s=1.0)


def test_a_process_of_a_group_may_open_as_many_connections_as_its_hard_limit_allows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def agreement(digests: list[str], facts: list[Any], settings: Any = None, timeout_s: float = LIMIT_S) -> list[Any]:
    """What each worker gets from `agree`: the facts, or the error."""
    store, n = HashStore(), len(digests)

    def one(i: int) -> Any:
        member = Member.at(i, n, torch.device("cpu"), store)
        try:
            return agree(member, digests[i], facts[i], settings=settings and settings[i], timeout_s=timeout_s)
        except (PeerError, TransportError) as error:
            return str(error)

    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(one, range(n)))


def test_all_workers_hear_the_facts_of_all():
    facts = [[10, 20], [10], []]
    assert agreement(["a"] * 3, facts) == [facts] * 3


def test_workers_of_another_configuration_are_named_by_all():
    errors = agreement(["old", "new", "new", "new"], [None] * 4)
    assert len(set(errors)) == 1
    assert errors[0].startswith("worker 0 run configuration 'old'; workers 1, 2, 3 run configuration 'new'")


def test_the_keys_in_which_workers_differ_are_named_with_their_values():
    odd, most = {"rule.lr": "0.7", "seed": "0"}, {"rule.lr": "0.5", "seed": "0"}
    errors = agreement(["a", "b", "a"], [None] * 3, [most, odd, most])
    assert len(set(errors)) == 1
    assert errors[0].startswith(
        "worker 1 has rule.lr = 0.7 and worker 0 has 0.5: start all workers with the same run file"
    )
    errors = agreement(["a", "b"], [None] * 2, [{**most, "only": "1"}, {f"key{i}": "1" for i in range(5)}])
    assert "worker 1 has key0 = 1 and worker 0 has none" in errors[0] and "and 5 more keys differ" in errors[0], errors[
        0
    ]


@pytest.mark.parametrize(
    "settings",
    [{"rule.lr": 0.7}, {"rule.lr": "0.7\n\x1b[31m"}, {"k" * 200: "1"}, {"k": "v" * 200}, [1], {"rule.lr": "0.5"}],
)
def test_settings_that_no_worker_sends_are_not_repeated(settings: Any):
    errors = agreement(["old", "new"], [None] * 2, [settings, {"rule.lr": "0.5"}])
    assert errors[0].startswith("worker 1 run configuration 'new'; worker 0 run configuration 'old'"), errors[0]


def test_a_worker_that_says_nothing_or_nonsense_is_named():
    store = HashStore()
    member = Member.at(0, 2, torch.device("cpu"), store)
    with pytest.raises(PeerError, match=r"worker 1 sent no configuration within 0\.2 s"):
        agree(member, "a", timeout_s=0.2)
    for turn, text in enumerate(("{}", "[" * 100_000, '["a"]'), start=2):
        member.entries.set(f"agree/1/{turn}", text)
        with pytest.raises(PeerError, match=f"worker 1 published {len(text)} bytes"):
            agree(member, "a", timeout_s=LIMIT_S)


def test_entries_without_the_code_of_the_run_count_as_none_and_a_worker_with_another_secret_is_named():
    store, text = HashStore(), '["a", null]'
    members = [
        Member.at(i, 2, torch.device("cpu"), store, secret=secret) for i, secret in enumerate((b"ours", b"other"))
    ]
    members[1].entries.set("agree/1/1", text)
    with pytest.raises(PeerError, match=r"the entry 'agree/1/1' of worker 1 .* does not carry the code"):
        agree(members[0], "a", timeout_s=LIMIT_S)
    ours = members[0].entries
    ours.set("one", text)
    sealed = store.get("one").decode()
    assert ours.get("one") == text.encode() == ours.several(["one", "none"])["one"]
    for forged in (
        sealed[:-1],
        sealed + " ",
        "0" + sealed[1:],
        "",
        text,
        sealed[:64] + "x" * (ENTRY_BYTES + 1),
    ):
        store.set("one", forged)
        assert ours.get("one") is None and ours.several(["one", "none"]) == {}, forged[:80]
    store.set("two", sealed)  # where it was not written
    assert ours.get("two") is None and ours.first("two", text) is None and ours.first("three", text) == text.encode()


def test_a_process_that_hosts_the_store_waits_at_its_end_for_those_that_have_not_ended_and_not_for_ever():
    store = HashStore()
    host, other = (Member.at(i, 2, torch.device("cpu"), store) for i in range(2))
    assert late_to_part(host, 0.05) == [1]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(late_to_part, host, LIMIT_S)
        time.sleep(0.1)
        assert not waiting.done()
        assert late_to_part(other, LIMIT_S) == []
        assert waiting.result() == []


def no_thread_starts(thread: threading.Thread) -> None:
    raise RuntimeError("can't create new thread at interpreter shutdown")


def test_a_store_is_asked_without_a_thread_while_python_exits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(threading.Thread, "start", no_thread_starts)
    entries = Entries(HashStore(), b"s")
    entries.set("one", "text")
    assert entries.get("one") == b"text"


def test_a_process_group_ends_without_a_thread_while_python_exits(monkeypatch: pytest.MonkeyPatch):
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(threading.Thread, "start", no_thread_starts)
    assert leave() and not dist.is_initialized()


def test_a_second_agreement_hears_nothing_of_the_first():
    store = HashStore()
    members = [Member.at(i, 2, torch.device("cpu"), store) for i in range(2)]
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(lambda member: agree(member, "old", timeout_s=LIMIT_S), members)] == [[None, None]] * 2
        early = pool.submit(agree, members[0], "new", "early", timeout_s=LIMIT_S)
        assert agree(members[1], "new", "late", timeout_s=LIMIT_S) == early.result() == ["early", "late"]


def test_facts_beyond_the_limit_are_refused():
    [sentence] = agreement(["a"], ["x" * ENTRY_BYTES])
    assert f"at most {ENTRY_BYTES}" in sentence


def greet(argv: Sequence[str]) -> int:
    print(argv[0], os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["OMP_NUM_THREADS"], Path.cwd())
    print("warning", file=sys.stderr)
    return 0


def test_workers_get_an_environment_and_their_lines_get_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert run_local(2, greet, ["hello"]) == 0
    captured = capfd.readouterr()
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // 2)))
    assert sorted(captured.out.splitlines()) == [f"[{i}] hello {i} 2 {threads} {tmp_path}" for i in range(2)]
    assert sorted(captured.err.splitlines()) == ["[0] warning", "[1] warning"]


def test_the_last_line_of_a_worker_is_forwarded_to_a_slow_reader():
    class Slow(io.StringIO):
        def write(self, text: str) -> int:
            time.sleep(1.5)
            return super().write(text)

    with contextlib.redirect_stdout(Slow()) as output:
        assert run_local(1, greet, ["hello"]) == 0
        assert output.getvalue().startswith("[0] hello 0 1 ")


def until_reported(member: Member) -> None:
    """Waits until the launcher has seen that a worker has failed, and has reported it."""
    with contextlib.suppress(PeerError):
        assert not member.entries.absent(["never written"], LIMIT_S), "no worker was reported"


def one_fails(argv: Sequence[str]) -> int:
    if os.environ["RANK"] == "1":
        return 7
    member = launched(LIMIT_S)
    assert member is not None
    until_reported(member)
    print("noticed")
    return 2


def test_the_first_failure_decides_and_the_others_may_end_by_themselves(capfd: pytest.CaptureFixture[str]):
    assert run_local(2, one_fails, [], grace_s=LIMIT_S) == 7
    assert capfd.readouterr().out == "[0] noticed\n"


def is_asked_as_it_ends(argv: Sequence[str]) -> int:
    def ask() -> None:
        threading.main_thread().join()  # Python's shutdown begins with its end, and waits for this thread
        os.kill(os.getpid(), signal.SIGTERM)

    if os.environ["RANK"] == "1":
        threading.Thread(target=ask).start()
    return main(["--version"]) or int(argv[0])


@pytest.mark.parametrize("code", [0, 130])
def test_a_process_that_is_asked_to_stop_as_it_ends_keeps_its_exit_code(code: int):
    assert run_local(2, is_asked_as_it_ends, [str(code)]) == code


def one_dies_and_one_hangs(argv: Sequence[str]) -> int:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.kill(os.getpid(), signal.SIGSTOP)
    return 0


def serves_in_vain(argv: Sequence[str]) -> int:
    """A server that cannot start, or a worker that looks for it until it is asked to leave."""
    if "--worker" not in argv:
        return 2
    time.sleep(600)
    return 0


def test_workers_of_a_server_that_could_not_start_are_asked_to_leave_at_once():
    start = time.monotonic()
    assert run_served(1, serves_in_vain, [], b"a secret", grace_s=280.0) == 2
    assert time.monotonic() - start < 100.0


def test_workers_that_never_end_are_ended_after_a_failure(forks: None):
    start = time.monotonic()
    assert run_local(2, one_dies_and_one_hangs, [], grace_s=0.1) == 128 + signal.SIGKILL
    assert time.monotonic() - start < 60.0


def end_stopped(member: Member) -> None:
    """Worker 0 ends worker 2, which stands still, once the launcher has seen the failure of worker 1."""
    if member.worker == 0:
        until_reported(member)
        os.kill(int(member.store.get("process/2")), signal.SIGKILL)


def lose_worker_2(argv: Sequence[str]) -> int:
    """Worker 2 ends by a signal in the middle of its message."""
    member = join(3, device="cpu", threads=1, timeout_s=LIMIT_S)
    member.store.set(f"process/{member.worker}", str(os.getpid()))
    transport, ticket = GroupTransport(member, run=1, timeout_s=4.0), Ticket(6)
    frames = [torch.ones(1 << 26, dtype=torch.uint8)]
    peers = [j for j in range(3) if j != member.worker]
    for j in peers:
        transport.expect(ticket, j, frames)
    if member.worker < 2:
        member.store.set(f"announced/{member.worker}", "")
    member.store.wait(["announced/0", "announced/1"])
    for j in peers:
        transport.post(ticket, j, frames)
    if member.worker == 2:
        os.kill(os.getpid(), getattr(signal, argv[0]))
    try:
        transport.wait(ticket)
    except PeerError as error:
        print(error, flush=True)
        if argv[0] == "SIGSTOP":
            end_stopped(member)
        return 2
    return 0


@pytest.mark.parametrize("fate", ["SIGKILL", "SIGSTOP"])
def test_survivors_of_a_worker_lost_amid_its_message_end_cleanly(capfd: pytest.CaptureFixture[str], fate: str):
    code = run_local(3, lose_worker_2, [fate], grace_s=LIMIT_S)
    captured = capfd.readouterr()
    words = "closed its connection" if fate == "SIGKILL" else "did not answer for 4 s"
    lines = sorted(captured.out.splitlines())
    assert [line[:30] for line in lines] == [f"[{i}] worker 2 {words}"[:30] for i in (0, 1)], captured
    assert code == (137 if fate == "SIGKILL" else 2)
    assert not captured.err


def lose_worker_2_at_the_start(argv: Sequence[str]) -> int:
    """Worker 2 ends by a signal before it has joined, or before it has agreed."""
    fate, place = argv
    lost = os.environ["RANK"] == "2"
    try:
        if lost and place == "join":
            os.kill(os.getpid(), getattr(signal, fate))
        member = join(3, device="cpu", threads=1, timeout_s=600.0)
        member.store.set(f"process/{member.worker}", str(os.getpid()))
        if lost:
            member.store.wait(["process/0", "process/1"])
            os.kill(os.getpid(), getattr(signal, fate))
        agree(member, "a", timeout_s=600.0 if fate == "SIGKILL" else 5.0)
    except PeerError as error:
        print(error, flush=True)
        if fate == "SIGSTOP":
            member.store.set(f"late/{member.worker}", "")
            member.store.wait(["late/0", "late/1"])  # else the end of one may be reported while the other still waits
            end_stopped(member)
    leave()
    return 2


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("fate", "place"), [("SIGKILL", "join"), ("SIGKILL", "agree"), ("SIGSTOP", "agree")])
def test_a_worker_lost_during_the_start_is_noticed_long_before_the_timeout_and_one_that_hangs_after_it(
    capfd: pytest.CaptureFixture[str], fate: str, place: str
):
    code = run_local(3, lose_worker_2_at_the_start, [fate, place], grace_s=LIMIT_S)
    lines = sorted(capfd.readouterr().out.splitlines())
    words = "ended with code 137 before" if fate == "SIGKILL" else "sent no configuration within 5 s"
    assert [words in line and f"[{i}] worker 2" in line for i, line in enumerate(lines)] == [True, True], lines
    assert code == (137 if fate == "SIGKILL" else 2)


def wait_for_long(argv: Sequence[str]) -> int:
    print(os.getpid(), flush=True)
    if argv:
        join(2, device="cpu", threads=1)
    time.sleep(600)  # longer than a test may take
    return 0


def launch_two(argv: Sequence[str]) -> int:
    import_early()
    return run_local(2, wait_for_long, argv)


def started(*words: str) -> tuple[Command, list[int]]:
    """A launcher of two workers that print their process ids, once they have."""
    launcher = Command(*words, work=launch_two)
    lines = (re.fullmatch(r"\[[01]\] (\d+)\n", line) for line in launcher.lines())
    matches = (found for found in lines if found)
    return launcher, [int(next(matches)[1]) for _ in range(2)]


def wait_until_gone(pids: list[int], launcher: Command) -> None:
    """Fails if any of the processes still runs after a while, and says where their launcher is then."""
    assert gone(pids, within_s=60.0), f"an orphan continues: {launcher.finish(0)}"


def gone(pids: list[int], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while any(map(running, pids)):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True


def running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it has ended, perhaps while it was read
        return False


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_simulation_without_the_gpu_it_asks_for_is_a_sentence():
    with pytest.raises(ConfigError, match="torch sees 0 GPUs"):
        one_device("cuda")
    assert one_device("auto") == torch.device("cpu")


def test_an_interrupt_ends_all_workers():
    launcher, pids = started()
    for _ in range(6):  # Python loses an interrupt that comes in a finalizer, as there are where they are started
        os.kill(launcher.pid, signal.SIGINT)
        if gone(pids, within_s=10.0):
            break
    wait_until_gone(pids, launcher)
    assert launcher.finish()[0] != 0


def test_no_worker_outlives_a_launcher_that_was_killed():
    launcher, pids = started("join")
    launcher.kill()
    wait_until_gone(pids, launcher)
    launcher.finish()
