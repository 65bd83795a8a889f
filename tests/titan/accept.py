"""Unmodified torchtitan jobs joined by a few words: `make titan`, in an environment of its own, as torchtitan needs triton.

- Two sites of two FSDP2 processes end with the bits of two sites of one process: weights, AdamW and outer state.
- So do two sites whose method, local steps and address are named by GOSSAMER_OUTER.
- Of three elastic sites one is killed and started again with the same words while the others train, and all end alike.
- A job of two processes is continued by four, and by one, from torchtitan's own checkpoints.

    python tests/titan/accept.py [diloco] [environment] [gasloc] [elastic] [resharded]      # all of them where none is named
"""

import atexit
import glob
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import torch

HERE = Path(__file__).parent
STEPS, LOCAL_STEPS = 6, 3


def assets(folder: Path) -> None:
    """A tokenizer and a text data set from Python's own library: nothing is downloaded."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    files = sorted(glob.glob(sysconfig.get_path("stdlib") + "/*.py"))[:60]
    (folder / "tok").mkdir(parents=True)
    (folder / "text").mkdir()
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tok.train(
        files[:20],
        trainers.BpeTrainer(vocab_size=512, special_tokens=["<|bos|>", "<|eos|>"], initial_alphabet=alphabet),
    )
    tok.save(str(folder / "tok" / "tokenizer.json"))
    (folder / "tok" / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|bos|>", "eos_token": "<|eos|>"}))
    with (folder / "text" / "train.jsonl").open("w") as out:
        for file in files:
            text = Path(file).read_text(errors="ignore")
            for k in range(0, len(text), 2000):
                out.write(json.dumps({"text": text[k : k + 2000]}) + "\n")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def outer_of(rule: str, **more: object) -> list[str]:
    """What makes jobs sites of one run."""
    options = {"rule": rule, "local_steps": LOCAL_STEPS, "join": f"127.0.0.1:{free_port()}", "timeout_s": 120, **more}
    return [f"gossamer.integrations.torchtitan.outer={json.dumps(options)}", "gossamer.integrations.torchtitan.metrics"]


def start(
    folder: Path,
    out: Path,
    processes: int,
    site: str,
    overrides: list[str],
    *more: str,
    steps: int = STEPS,
    asked: str | None = None,
) -> subprocess.Popen[str]:
    """Args: `asked` is GOSSAMER_OUTER in its environment."""
    environment = {
        **os.environ,
        **({} if asked is None else {"GOSSAMER_OUTER": asked}),
        "GOSSAMER_SITE": site,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "WANDB_MODE": "disabled",
        "PYTHONPATH": f"{HERE}:{HERE.parents[1] / 'src'}:{os.environ.get('PYTHONPATH', '')}",
    }
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(processes),
        "--master-port",
        str(free_port()),
        str(HERE / "cpu_titan.py"),
        "--module",
        "llama3",
        "--config",
        "llama3_debugmodel",
        "--hf_assets_path",
        str(folder / "tok"),
        "--dataloader.dataset_path",
        str(folder / "text"),
        "--dump_folder",
        str(out),
        "--training.local_batch_size",
        "2",
        "--training.seq_len",
        "64",
        "--training.steps",
        str(steps),
        "--training.max_norm",
        "1e9",
        "--parallelism.spmd_backend",
        "partial_dtensor",
        "--optimizer.implementation",
        "for-loop",
        "--checkpoint.enable",
        "--checkpoint.interval",
        str(LOCAL_STEPS),
        "--lr_scheduler.warmup_steps",
        "1",
        "--comm.init_timeout_seconds",
        "120",
        "--validator.freq",
        "1000",
        "--metrics.log_freq",
        str(LOCAL_STEPS),
        "--metrics.enable_tensorboard",
        "--override.imports",
        "cpu_titan.sdpa",
        *overrides,
        *more,
    ]
    log = (out.parent / f"{out.name}.log").open("a")
    job = subprocess.Popen(words, env=environment, stdout=log, stderr=subprocess.STDOUT, text=True, cwd=folder)
    atexit.register(end, job)
    return job


def end(job: subprocess.Popen[str]) -> None:
    """Kills all processes of a job that has not ended, as a machine that loses its power does."""
    if job.poll() is None:
        workers = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()  # in sessions of their own
        for pid in [job.pid, *map(int, workers)]:
            os.kill(pid, signal.SIGKILL)
        job.wait()


def must_end_well(folder: Path, jobs: dict[str, subprocess.Popen[str]]) -> None:
    """Waits for jobs, and shows the logs where one of them has failed."""
    codes = {name: job.wait(timeout=900) for name, job in jobs.items()}
    if any(codes.values()):
        for name in codes:
            print(name, (folder / f"{name}.log").read_text()[-6000:])
        raise SystemExit(f"they ended with {codes}")


def both(
    folder: Path, name: str, processes: int, rule: str, seed: Path | None, *more: str, by_environment: bool = False
) -> None:
    """Two sites of so many processes, to their end."""
    overrides, asked = outer_of(rule), None
    if by_environment:
        overrides[0], asked = (
            "gossamer.integrations.torchtitan.outer",
            f"{rule}:{LOCAL_STEPS}@127.0.0.1:{free_port()}",
        )
    overrides.append('gossamer.integrations.torchtitan.data={"same": true}')
    load = () if seed is None else ("--checkpoint.initial_load_path", str(seed), "--checkpoint.initial_load_model_only")
    jobs = {
        f"{name}-{site}": start(
            folder, folder / f"{name}-{site}", processes, f"{site}/2", overrides, *load, *more, asked=asked
        )
        for site in range(2)
    }
    must_end_well(folder, jobs)
    print(name, log_lines(folder, f"{name}-0"), flush=True)


def log_lines(folder: Path, name: str) -> list[str]:
    """What a job has logged of the outer loop."""
    lines = (folder / f"{name}.log").read_text().splitlines()
    return [line.partition("gossamer: ")[2] for line in lines if "gossamer: " in line]


def until(folder: Path, name: str, pattern: str, limit_s: float = 400.0) -> re.Match[str]:
    """Waits until the log of a job has it."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if found := re.search(pattern, (folder / f"{name}.log").read_text()):
            return found
        time.sleep(0.5)
    for log in sorted(folder.glob("*.log")):
        print(log.name, log.read_text()[-6000:])
    raise SystemExit(f"{name} never said {pattern}")


def found(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """The tensors of the newest checkpoint of a job."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    last = max((folder / name / "checkpoint").glob("step-*"), key=lambda path: int(path.name[5:]))
    dcp_to_torch_save(last, folder / "whole.pt")

    def flat(tree: object, at: str = "") -> dict[str, torch.Tensor]:
        if isinstance(tree, dict):
            return {k: t for key, value in tree.items() for k, t in flat(value, f"{at}{key}.").items()}
        return {at: tree} if isinstance(tree, torch.Tensor) else {}

    return flat(torch.load(folder / "whole.pt", weights_only=False))


def compare(folder: Path, one: str, other: str) -> bool:
    alike = True
    for site in range(2):
        a, b = found(folder, f"{one}-{site}"), found(folder, f"{other}-{site}")
        odd = [key for key in a if key not in b or not torch.equal(a[key], b[key])]
        outer = sum("outer." in key for key in a)
        print(
            f"{one} and {other}, site {site}: {len(a)} tensors, {outer} of the outer state, {len(odd)} differ {odd[:3]}"
        )
        alike &= not odd and len(a) == len(b) and outer > 0
    return alike


ROUNDS = 24


def elastic(folder: Path, begin: Path) -> bool:
    """Three sites of two processes, of which the last is killed and comes back while the others train."""
    words = [*outer_of("diloco", elastic=True), f'gossamer.integrations.torchtitan.data={{"rounds": {ROUNDS}}}']
    load = ("--checkpoint.initial_load_path", str(begin), "--checkpoint.initial_load_model_only")

    def site(k: int, *more: str) -> subprocess.Popen[str]:
        out = folder / f"elastic-{k}"
        return start(folder, out, 2, f"{k}/3", words, *load, *more, steps=ROUNDS * LOCAL_STEPS)

    jobs = {f"elastic-{k}": site(k) for k in range(3)}
    until(folder, "elastic-2", r"site 2 of 3, round 3,")
    end(jobs["elastic-2"])
    # The same words, but that it saves each step: it joins within a round of its own steps, and its last state is compared.
    jobs["elastic-2"] = site(2, "--checkpoint.interval", "1")
    back = until(folder, "elastic-2", r"site 2 continues with the state of site \d after round \d+")
    others = max(int(one) for one in re.findall(r"site 0 of 3, round (\d+),", (folder / "elastic-0.log").read_text()))
    print(f"killed after round 3; {back[0]}, when site 0 had ended round {others}", flush=True)
    must_end_well(folder, jobs)
    ends = {name: found(folder, name) for name in jobs}
    alike = True
    for name, tensors in ends.items():
        weights = [
            key
            for key, t in tensors.items()
            if t.is_floating_point() and t.ndim and ("outer." in key or not key.startswith(("optimizer", "dataloader")))
        ]
        odd = [key for key in weights if not torch.equal(tensors[key], ends["elastic-0"][key])]
        print(
            f"{name}: {len(weights)} tensors of weights and outer state, {len(odd)} differ from site 0 {odd[:3]};",
            log_lines(folder, name)[-2:],
        )
        alike &= bool(weights) and not odd
    return alike and in_tensorboard(folder / "elastic-0")


def in_tensorboard(folder: Path) -> bool:
    """Whether torchtitan's own log has the metrics of the outer loop."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    [events] = {path.parent for path in folder.glob("**/events.out.*")}
    log = EventAccumulator(str(events))
    log.Reload()
    tags = sorted(tag for tag in log.Tags()["scalars"] if tag.startswith("outer/"))
    print("TensorBoard has", {tag: round(log.Scalars(tag)[-1].value, 4) for tag in tags}, flush=True)
    return len(tags) == 5


def resharded(folder: Path) -> bool:
    """One site of two processes is continued by four, and then by one; and by two, to compare with."""
    words = [*outer_of("diloco"), 'gossamer.integrations.torchtitan.data={"same": true}']

    def job(name: str, processes: int, steps: int) -> None:
        must_end_well(folder, {name: start(folder, folder / name, processes, "0/1", words, steps=steps)})

    job("first", 2, 4)
    ends = {}
    for name, processes in {"by two, by two": (2, 2), "by four, by one": (4, 1)}.items():
        shutil.copytree(folder / "first", folder / name)
        for count, steps in zip(processes, (8, 12), strict=True):
            job(name, count, steps)
        ends[name] = found(folder, name)
    one, other = ends.values()
    apart = max(
        float((one[k] - other[k]).abs().max() / (1e-3 + one[k].abs().max())) for k in one if one[k].is_floating_point()
    )
    outer = sum("outer." in key for key in other)
    print(
        f"two processes, then four, then one: {len(other)} tensors, {outer} of the outer state, within {apart:.1e} of two"
    )
    return one.keys() == other.keys() and outer > 0 and apart < 1e-3


def main() -> int:
    began = time.time()
    print(f"torch {torch.__version__}, torchtitan {version('torchtitan')}, Python {sys.version.split()[0]}", flush=True)
    with tempfile.TemporaryDirectory() as text:
        folder, well = Path(text), True
        assets(folder)
        seed = start(folder, folder / "seed", 1, "0/1", [], "--checkpoint.create_seed_checkpoint")
        must_end_well(folder, {"seed": seed})
        begin = folder / "seed" / "checkpoint" / "step-0"
        for what in sys.argv[1:] or ("diloco", "environment", "gasloc", "elastic", "resharded"):
            if what == "environment":
                both(folder, "diloco by environment", 1, "diloco", begin, by_environment=True)
                if not (folder / "diloco on one-0").exists():
                    both(folder, "diloco on one", 1, "diloco", begin)
                well &= compare(folder, "diloco by environment", "diloco on one")
            elif what == "elastic":
                well &= elastic(folder, begin)
            elif what == "resharded":
                well &= resharded(folder)
            else:
                both(folder, f"{what} on two", 2, what, begin)
                both(folder, f"{what} on one", 1, what, begin)
                well &= compare(folder, f"{what} on two", f"{what} on one")
    print(f"{'ACCEPTED' if well else 'DIFFERENT'} after {time.time() - began:.0f} s")
    return not well


if __name__ == "__main__":
    sys.exit(main())
