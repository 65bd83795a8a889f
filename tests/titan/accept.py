"""Unmodified torchtitan jobs joined by two words: `make titan`, in an environment of its own, as torchtitan needs triton.

Two sites of two FSDP2 processes end with the bits of two sites of one process: weights, AdamW and outer state.
"""

import glob
import json
import os
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


def start(
    folder: Path, out: Path, processes: int, site: str, overrides: list[str], *more: str
) -> subprocess.Popen[str]:
    environment = {
        **os.environ, "GOSSAMER_SITE": site, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "WANDB_MODE": "disabled",
        "PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}",
    }  # fmt: skip
    words = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", str(free_port()),
        str(HERE / "cpu_titan.py"), "--module", "llama3", "--config", "llama3_debugmodel",
        "--hf_assets_path", str(folder / "tok"), "--dataloader.dataset_path", str(folder / "text"), "--dump_folder", str(out),
        "--training.local_batch_size", "2", "--training.seq_len", "64", "--training.steps", str(STEPS),
        "--training.max_norm", "1e9", "--parallelism.spmd_backend", "partial_dtensor", "--optimizer.implementation", "for-loop",
        "--checkpoint.enable", "--checkpoint.interval", str(LOCAL_STEPS), "--lr_scheduler.warmup_steps", "1",
        "--comm.init_timeout_seconds", "120", "--validator.freq", "1000",
        "--override.imports", "cpu_titan.sdpa", *overrides, *more,
    ]  # fmt: skip
    log = (out.parent / f"{out.name}.log").open("w")
    return subprocess.Popen(words, env=environment, stdout=log, stderr=subprocess.STDOUT, text=True, cwd=folder)


def both(folder: Path, name: str, processes: int, rule: str, seed: Path | None, *more: str) -> None:
    """Two sites of so many processes, to their end."""
    options = {"rule": rule, "local_steps": LOCAL_STEPS, "join": f"127.0.0.1:{free_port()}", "timeout_s": 120}
    overrides = [
        f"gossamer.integrations.torchtitan.outer={json.dumps(options)}",
        'gossamer.integrations.torchtitan.data={"same": true}',
    ]
    load = () if seed is None else ("--checkpoint.initial_load_path", str(seed), "--checkpoint.initial_load_model_only")
    jobs = [
        start(folder, folder / f"{name}-{site}", processes, f"{site}/2", overrides, *load, *more) for site in range(2)
    ]
    codes = [job.wait(timeout=500) for job in jobs]
    if any(codes):
        for site in range(2):
            print((folder / f"{name}-{site}.log").read_text()[-6000:])
        raise SystemExit(f"{name} ended with {codes}")
    print(
        name,
        [line[-90:] for line in (folder / f"{name}-0.log").read_text().splitlines() if "gossamer:" in line],
        flush=True,
    )


def found(folder: Path, name: str, site: int) -> dict[str, torch.Tensor]:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    last = folder / f"{name}-{site}" / "checkpoint" / f"step-{STEPS}"
    dcp_to_torch_save(last, folder / "whole.pt")

    def flat(tree: object, at: str = "") -> dict[str, torch.Tensor]:
        if isinstance(tree, dict):
            return {k: t for key, value in tree.items() for k, t in flat(value, f"{at}{key}.").items()}
        return {at: tree} if isinstance(tree, torch.Tensor) else {}

    return flat(torch.load(folder / "whole.pt", weights_only=False))


def compare(folder: Path, one: str, other: str) -> bool:
    alike = True
    for site in range(2):
        a, b = found(folder, one, site), found(folder, other, site)
        odd = [key for key in a if key not in b or not torch.equal(a[key], b[key])]
        outer = sum("outer." in key for key in a)
        print(
            f"{one} and {other}, site {site}: {len(a)} tensors, {outer} of the outer state, {len(odd)} differ {odd[:3]}"
        )
        alike &= not odd and len(a) == len(b) and outer > 0
    return alike


def main() -> int:
    began = time.time()
    print(f"torch {torch.__version__}, torchtitan {version('torchtitan')}, Python {sys.version.split()[0]}", flush=True)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        assets(folder)
        seed = start(folder, folder / "seed", 1, "0/1", [], "--checkpoint.create_seed_checkpoint")
        if seed.wait(timeout=300):
            raise SystemExit((folder / "seed.log").read_text()[-6000:])
        begin = folder / "seed" / "checkpoint" / "step-0"
        alike = True
        for rule in sys.argv[1:] or ("diloco", "gasloc"):
            both(folder, f"{rule} on two", 2, rule, begin)
            both(folder, f"{rule} on one", 1, rule, begin)
            alike &= compare(folder, f"{rule} on two", f"{rule} on one")
    print(f"{'EQUAL' if alike else 'DIFFERENT'} after {time.time() - began:.0f} s")
    return not alike


if __name__ == "__main__":
    sys.exit(main())
