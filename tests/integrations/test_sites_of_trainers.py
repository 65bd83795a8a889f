"""The Trainer and Accelerate with several processes in each worker, which is a world of its own: FSDP2 inside, rounds between.

Accelerate shards by FSDP2 on GPUs alone. Here it is told that it may on a CPU too; nothing else of it is changed.
"""

import importlib.util
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]
from torch.utils.data import DataLoader, TensorDataset

from commands import Command, free_port, in_forks
from gossamer.errors import GossamerError
from gossamer.integrations import Place
from gossamer.library.dtensors import as_dtensor
from gossamer.transport.processes.local import loopback

MISSING = [name for name in ("accelerate", "transformers") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"needs the extra 'integrations', without which {MISSING} are missing")
]
STEPS, SAVED, LOCAL_STEPS = 8, 5, 3
NAMES = ("accelerate", "trainer", "accelerate, copies")


class Site:
    """One process of one of two sites."""

    def __init__(self, rank: int, joins: list[str], folder: Path) -> None:
        self.site, self.shard = divmod(rank, 2)
        self.folder, self._joins = folder / f"site-{self.site}", iter(joins)
        self.place, self.rank = Place(self.site, 2), rank
        store = FileStore(f"{folder}/world-{self.site}", 2)
        dist.init_process_group("gloo", store=store, rank=self.shard, world_size=2)
        os.environ.update(
            {"RANK": str(self.shard), "LOCAL_RANK": str(self.shard), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        )

    def options(self) -> dict[str, Any]:
        return {"local_steps": LOCAL_STEPS, "site": (self.site, 2), "join": next(self._joins), "timeout_s": 60}

    def say(self, what: str, words: object) -> None:
        os.write(1, f"{self.rank} {what}: {words}\n".encode())

    def keep(self, what: str, model: nn.Module) -> None:
        named = {
            name: p.full_tensor() if (p := as_dtensor(t)) is not None else t for name, t in model.named_parameters()
        }
        torch.save(
            {name: t.detach().clone() for name, t in named.items()}, self.folder.parent / f"{what}-{self.rank}.pt"
        )


def may_shard_on_a_cpu(may: bool) -> None:
    """Lets Accelerate believe that the processes may be sharded over, as it does of GPUs."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    init = getattr(AcceleratorState.__init__, "theirs", AcceleratorState.__init__)

    def init_and_shard(self: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        init(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None:
            AcceleratorState._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=fsdp_plugin)
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    init_and_shard.theirs = init  # type: ignore[attr-defined]
    AcceleratorState.__init__ = init_and_shard if may else init  # type: ignore[method-assign]
    AcceleratorState._reset_state(reset_partial_state=True)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def with_accelerate(site: Site, name: str, *, resumes: bool = False) -> None:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, skip_first_batches

    from gossamer.integrations.accelerate import prepare_outer

    accelerator = Accelerator(
        cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    )
    samples = TensorDataset(torch.randn(128, 3, generator=torch.Generator().manual_seed(1)))
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(site.place.shard(samples), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    outer = prepare_outer(accelerator, model, "gasloc", **site.options())
    at, steps = site.folder / name, 0
    if resumes:
        accelerator.load_state(at)
        steps = SAVED
    for (x,) in skip_first_batches(loader, steps):
        accelerator.backward((model(x) - x.sum(1, keepdim=True)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        outer.step()
        steps += 1
        if steps == SAVED and not resumes:
            accelerator.save_state(at)
        if steps == STEPS:
            break
    site.keep(f"{name}, resumed" if resumes else name, accelerator.unwrap_model(model))
    site.say(name, f"{outer}, sends {outer.metrics().bytes_sent}")
    outer.close()


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=16, use_cache=False, **sizes))


def with_trainer(site: Site, name: str, *, resumes: bool = False, **more: Any) -> None:
    from transformers import Trainer, TrainingArguments

    from gossamer.integrations.transformers import TransformersCallback

    words = torch.randint(16, (128, 5), generator=torch.Generator().manual_seed(1))
    args = TrainingArguments(
        str(site.folder / name),
        max_steps=STEPS,
        save_steps=SAVED,
        logging_steps=1,
        per_device_train_batch_size=2,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        fsdp=True,
        fsdp_config={"version": 2},
        **more,
    )
    texts = site.place.shard([{"input_ids": one, "labels": one} for one in words])
    callback = TransformersCallback("gasloc", **site.options())
    trainer = Trainer(llama(), args, train_dataset=texts, callbacks=[callback])
    trainer.train(resume_from_checkpoint=str(site.folder / name / f"checkpoint-{SAVED}") if resumes else None)
    site.keep(f"{name}, resumed" if resumes else name, trainer.model)
    site.say(name, f"{callback.outer}, {sorted(trainer.state.log_history[0])}")


def one_process(rank: int, joins: list[str], folder: Path, resumed: list[str]) -> None:
    torch.set_num_threads(1)
    site = Site(rank, joins, folder)

    class Said(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            site.say("warned", record.getMessage())

    logging.getLogger("gossamer").addHandler(Said())
    acts: list[tuple[str, Callable[..., None], bool]] = [
        ("accelerate", with_accelerate, True),
        ("trainer", with_trainer, True),
        ("accelerate, copies", with_accelerate, False),
    ]
    for name, act, may in acts:
        for resumes in (False, True) if name in resumed else (False,):
            may_shard_on_a_cpu(may)
            act(site, name, resumes=resumes)
            dist.barrier()
    try:
        may_shard_on_a_cpu(True)
        site.options = lambda: {"local_steps": 3}  # type: ignore[method-assign]
        with_trainer(site, "no site")
    except GossamerError as error:
        site.say("no site", error)


def four(argv: list[str]) -> int:
    import accelerate  # noqa: F401 (in each fork it would take seconds)
    import transformers  # noqa: F401

    folder, resumed, *joins = argv
    return in_forks(4, lambda rank: one_process(rank, joins, Path(folder), json.loads(resumed)))


@pytest.fixture(scope="module")
def told(looked_at: set[object], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """What two sites of two processes keep and say, each resumed where that is looked at."""
    resumed = json.dumps([name for name in NAMES if name in looked_at])
    folder = tmp_path_factory.mktemp("sites")
    joins = [f"127.0.0.1:{free_port()}" for _ in range(6)]
    # With a GPU in sight torch shards over GPUs, one for each process.
    on_a_cpu = {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    code, output = Command(folder, resumed, *joins, work=four, GLOO_SOCKET_IFNAME=loopback(), **on_a_cpu).finish()
    assert code == 0, output
    return folder, output


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", NAMES)
def test_a_worker_of_two_processes_trains_and_resumes_within_a_round_to_the_same_bits(told, name):
    folder, output = told
    for rank in range(4):
        assert (
            f"{rank} {name}: Outer(gasloc" in output
            and f"shard={rank % 2} of 2, worker={rank // 2} of 2, rounds=2" in output
        )
        first, again, sibling = (
            torch.load(folder / f"{file}.pt")
            for file in (f"{name}-{rank}", f"{name}, resumed-{rank}", f"{name}-{rank ^ 1}")
        )
        assert first.keys() == again.keys() and [key for key in first if not torch.equal(first[key], again[key])] == []
        assert all(torch.equal(t, sibling[key]) for key, t in first.items())
    assert "outer/rounds" in output


def test_where_accelerate_made_copies_in_place_of_fsdp_on_a_cpu_a_sentence_says_so(told, looked_at):
    warned = [
        line for line in told[1].splitlines() if "warned: Accelerate holds the whole model in each of the 2" in line
    ]
    assert len(warned) == 4 * (1 + ("accelerate, copies" in looked_at)) and all(
        "ignores on a CPU without a word" in line for line in warned
    )


def test_several_processes_without_a_site_are_refused_with_both_ways(told):
    assert "the Trainer counts 2 processes" in told[1] and "give site=(0, 2)" in told[1]
