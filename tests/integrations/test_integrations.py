"""Gossamer in the trainers of others: the scripts of the how-to page in two processes, against plain loops on their batches.

The example of a loop of one's own is here too, as it needs `transformers`, which takes seconds to import.
"""

import ast
import contextlib
import copy
import importlib
import importlib.util
import inspect
import json
import os
import re
import runpy
import shutil
import sys
import textwrap
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed import TCPStore
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import gossamer
from commands import Command, free_port, in_forks
from gossamer.errors import CheckpointError, ConfigError, MissingPackageError
from gossamer.integrations import Place, as_worker, newest_common_step
from gossamer.integrations.begin import load_outer, must_resume_alike, save_outer, warn_of_few_checkpoints
from gossamer.integrations.place import COUNTED, FAMILIES, _take_numbers
from gossamer.library import Outer, OuterOptions
from gossamer.transport.processes.local import loopback

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "trainers.md"
EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"
SCRIPTS = dict(re.findall(r'```python title="(\w+)"\n(.*?)```', PAGE.read_text(encoding="utf-8"), re.DOTALL))
SMALL = {"3000": "12", "=500": "=4", "% 500": "% 4", "=30": "=3", "=100": "=1"}  # the page's steps, in a size for tests
BATCHES = 2  # of a step
PLAIN, LATE = None, gossamer.Schedule(overlap_steps=2)
STOPS = {
    PLAIN: (8, 10),
    LATE: (4, 6),
}  # last checkpoint, within a round and for LATE with exchanges in flight; step that fails

MISSING = [name for name in SCRIPTS if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(
        bool(MISSING), reason=f"needs the extra 'integrations', without which {MISSING} are not installed"
    ),
]


class Crash(Exception):
    """What stops a script."""


def flat(model):
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()]).cpu()


class Recorder:
    """The arguments of a model's calls, with its parameters before each; it raises Crash in the first call of a step."""

    def __init__(self, model, crash=None):
        self.model, self.calls, self.trace, self.crash = model, [], [], crash
        model.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module, args, kwargs):
        if len(self.calls) == (self.crash or -1) * BATCHES:
            raise Crash
        self.calls.append(copy.deepcopy((args, kwargs)))
        self.trace.append(flat(self.model))


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def llama(seed=0):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=16, tie_word_embeddings=True, use_cache=False, **sizes))


def loss_of(model, batch):
    (x,) = batch
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def numbers():
    return TensorDataset(torch.randn(64, 3, generator=torch.Generator().manual_seed(1)))


def texts():
    words = torch.randint(16, (64, 5), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": one, "labels": one} for one in words]


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def script(name, schedule):
    """A script of the page, with fewer steps."""
    code = SCRIPTS[name]
    for long, short in SMALL.items():
        code = code.replace(long, short)
    if schedule:
        code = code.replace("local_steps=3", "local_steps=3, schedule=LATE").replace("out/", "late/")
    return compile(code, f"{PAGE} ({name})", "exec")


def plain(model, calls, loss, optimizer, schedule, before=lambda: None, after=lambda: None):
    """The parameters before each batch, and at the end, of a plain loop."""
    trace, (args, kwargs) = [], calls[0]
    model.to(next(one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)).device)
    with gossamer.Outer(model, "diloco", local_steps=3, schedule=schedule) as outer:
        for i, (args, kwargs) in enumerate(calls, 1):
            trace.append(flat(model))
            loss(model, args, kwargs).backward()
            if i % BATCHES == 0:
                before()
                optimizer.step()
                after()
                optimizer.zero_grad()
                outer.step()
        outer.finish()
    return [*trace, flat(model)]


def run(name, schedule, given, model, close):
    """Runs a script until it crashes, and then again with another model: the calls and the parameters of both, and its names."""
    saved, crash = STOPS[schedule]
    first = Recorder(model(0), crash)
    names = {**given(first.model), "LATE": LATE}
    with pytest.raises(Crash):
        exec(script(name, schedule), names)
    close(names)
    second = Recorder(model(1))
    names = {**given(second.model), "LATE": LATE}
    exec(script(name, schedule), names)
    kept = saved * BATCHES
    calls = first.calls[:kept] + second.calls
    return calls, [*first.trace[:kept], *second.trace, flat(second.model)], names


def with_transformers(schedule):
    """What the Trainer's model was before each batch, and what that of a plain loop was."""
    import transformers

    def close(names):  # the Trainer tells its callbacks of no exception
        for callback in names["trainer"].callback_handler.callbacks:
            if hasattr(callback, "outer"):
                callback.outer.close()

    calls, trace, names = run(
        "transformers", schedule, lambda model: {"model": model, "dataset": texts()}, llama, close
    )
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.0, fused=True)
    slower = transformers.get_linear_schedule_with_warmup(optimizer, 0, 12)

    def clip():
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    model.train()
    log = names["trainer"].state.log_history
    return {
        "trace": trace,
        "plain": plain(
            model, calls, lambda m, args, kwargs: m(**kwargs).loss, optimizer, schedule, before=clip, after=slower.step
        ),
        "rounds": [entry["outer/rounds"] for entry in log],
        "batches": [kwargs["input_ids"] for _, kwargs in calls],
    }


def refused_by_the_trainer():
    """What the Trainer's callback says of a batch size that may change, and of a checkpoint without an outer state."""
    from transformers import Trainer, TrainingArguments

    from gossamer.integrations.transformers import TransformersCallback

    said, folder = [], f"out/worker-{as_worker().worker}"
    shutil.rmtree(f"{folder}/checkpoint-8/outer")
    for options, resume in (({"auto_find_batch_size": True}, None), ({}, f"{folder}/checkpoint-8")):
        args = TrainingArguments(folder, max_steps=12, report_to="none", **options)
        trainer = Trainer(llama(), args, train_dataset=texts(), callbacks=[TransformersCallback("diloco")])
        with pytest.raises((ConfigError, CheckpointError)) as refused:
            trainer.train(resume_from_checkpoint=resume)
        said.append(str(refused.value))
    return said


def half_loss(model, args, kwargs):
    return loss_of(model, args) / BATCHES


def with_accelerate(schedule):
    """As `with_transformers`."""
    calls, trace, names = run(
        "accelerate",
        schedule,
        lambda model: {"model": model, "optimizer": adam(model), "dataset": numbers(), "loss_of": loss_of},
        net,
        lambda names: names["outer"].close(),
    )
    names["accelerator"].save_model(names["model"], "exported")
    model = net()
    return {
        "trace": trace,
        "plain": plain(model, calls, half_loss, adam(model), schedule),
        "batches": [args[0] for args, _ in calls],
        "exported": load_file("exported/model.safetensors"),
    }


def lightning_module(net):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def training_step(self, batch):
            return loss_of(self.net, batch)

        def configure_optimizers(self):
            return adam(self)

    return Module(net)


def with_lightning(schedule):
    """As `with_transformers`."""
    calls, trace, names = run(
        "lightning",
        schedule,
        lambda model: {"module": lightning_module(model), "dataset": numbers()},
        net,
        lambda names: None,
    )
    rounds = [names["trainer"].logged_metrics["outer/rounds"].item()]
    names["trainer"].fit_loop.epoch_loop.max_steps = 15
    names["trainer"].fit(names["module"], names["loader"])
    model = net()
    return {
        "trace": trace,
        "plain": plain(model, calls, half_loss, adam(model), schedule),
        "rounds": [*rounds, names["trainer"].logged_metrics["outer/rounds"].item()],
        "batches": [args[0] for args, _ in calls],
    }


def refusals():
    """What is said when the frameworks count two processes."""
    import lightning
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from transformers import Trainer, TrainingArguments

    from gossamer.integrations import lightning as for_lightning
    from gossamer.integrations import transformers as for_transformers
    from gossamer.integrations.accelerate import prepare_outer
    from gossamer.integrations.lightning import LightningCallback
    from gossamer.integrations.transformers import TransformersCallback

    assert for_lightning.last_common_checkpoint and for_transformers.last_common_checkpoint
    said, launcher = {}, dict(os.environ)
    with pytest.raises(ConfigError) as refused:
        prepare_outer(Accelerator(cpu=True), net(), "diloco")
    said["accelerate"] = str(refused.value)
    args = TrainingArguments("out/refused", use_cpu=True, max_steps=1, report_to="none")
    trainer = Trainer(llama(), args, train_dataset=texts(), callbacks=[TransformersCallback("diloco")])
    with pytest.raises(ConfigError) as refused:
        trainer.train()
    said["transformers"] = str(refused.value)
    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", callbacks=[LightningCallback("diloco")])
    with pytest.raises(ConfigError) as refused:
        trainer.fit(lightning_module(net()), DataLoader(numbers()))
    said["lightning"] = str(refused.value)
    AcceleratorState._reset_state(reset_partial_state=True)
    dist.destroy_process_group()
    os.environ.update(launcher)  # Lightning has removed some
    return said


def too_short():
    """What is said of 23 samples, accumulation 8 and local_steps = 4: three epochs are three steps, and six are six."""
    import lightning
    from transformers import Trainer, TrainingArguments

    from gossamer.integrations.lightning import LightningCallback
    from gossamer.integrations.transformers import TransformersCallback

    place, said = as_worker(), {}

    def trainer(epochs, samples):
        args = TrainingArguments(
            f"out/worker-{place.worker}",
            num_train_epochs=epochs,
            per_device_train_batch_size=2,
            save_strategy="no",
            gradient_accumulation_steps=8,
            report_to="none",
            use_cpu=True,
        )
        callback = TransformersCallback("diloco", local_steps=4)
        Trainer(llama(), args, train_dataset=samples, callbacks=[callback]).train()
        return callback.outer.rounds

    def fit(epochs, samples):
        callback = LightningCallback("diloco", local_steps=4)
        options = {"enable_checkpointing": False, "logger": False, "enable_progress_bar": False}
        lightning.Trainer(
            accelerator="cpu", devices=1, max_epochs=epochs, accumulate_grad_batches=8, callbacks=[callback], **options
        ).fit(lightning_module(net()), DataLoader(samples, batch_size=2))
        return callback.outer.rounds

    for name, train, data in (("transformers", trainer, texts()), ("lightning", fit, numbers())):
        mine = place.shard([data[k] for k in range(23)])
        with pytest.raises(ConfigError) as refused:
            train(3, mine)
        said[name] = {"none": str(refused.value)}
        said[name]["rounds"] = train(6, mine)
        with pytest.raises(ConfigError) as refused:
            train(4 + place.worker, mine)
        said[name]["uneven"] = str(refused.value)
    return said


def work(rank, port, late):
    """What one of the two processes does for all tests here, and with exchanges in flight in these frameworks."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    from gossamer.integrations.transformers import last_common_checkpoint

    torch.use_deterministic_algorithms(True)
    found = {"refusals": refusals()}
    place = as_worker()
    assert as_worker() == place and "WORLD_SIZE" not in os.environ
    with pytest.raises(CheckpointError) as refused:
        must_resume_alike(4 * place.worker, net(), None)
    found["steps"] = str(refused.value)
    # Worker 1 has died between the save of worker 0 and its own.
    mine = [("checkpoint-10", "checkpoint-20"), ("checkpoint-5", "checkpoint-10", "checkpoint-x")][place.worker]
    for name in mine:
        (Path("common") / f"worker-{place.worker}" / name / "outer" / "round-000001").mkdir(parents=True)
        (Path("common") / f"worker-{place.worker}" / name / "outer" / "round-000001" / "worker-000.json").touch()
    common = last_common_checkpoint(f"common/worker-{place.worker}")
    found["common"] = (Path(str(common)).name, newest_common_step([3, 7] if place.worker else [4, 8]))
    for name, train in (
        ("transformers", with_transformers),
        ("accelerate", with_accelerate),
        ("lightning", with_lightning),
    ):
        Path(name).mkdir(exist_ok=True)
        with contextlib.chdir(name):
            found[name] = train(PLAIN)
            if name in late:
                found[name, "late"] = train(LATE)
            if name == "transformers":
                found["refused"] = refused_by_the_trainer()
    found["short"] = too_short()
    torch.save(found, f"found-{place.worker}.pt")


def train_the_example(rank, port):
    """The script of the example: in two processes that find what torchrun sets, and as the third alone."""
    sys.argv[1:] = ["--steps", "20"]
    if rank < 2:
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "WORLD_SIZE": "2",
            "RANK": str(rank),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
    runpy.run_path(str(EXAMPLE), run_name="__main__")


def train_a_site(site, join):
    """One of two sites in Lightning, each a process that no launcher counts."""
    import lightning

    from gossamer.integrations.lightning import LightningCallback

    callback, module = LightningCallback("diloco", local_steps=2, site=(site, 2), join=join), lightning_module(net())
    options = {"enable_checkpointing": False, "logger": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(accelerator="cpu", devices=1, max_steps=4, callbacks=[callback], **options)
    samples = numbers()
    trainer.fit(module, DataLoader([samples[k] for k in range(site, 16, 2)], batch_size=2))
    torch.save({"rounds": callback.outer.rounds, "state": module.state_dict()}, f"site-{site}.pt")


def train_as_the_environment_says(site, ports):
    """Each framework as one of two sites by GOSSAMER_OUTER alone: how many workers each has counted, and its last weights."""
    import lightning
    from accelerate import Accelerator
    from transformers import Trainer, TrainingArguments

    from gossamer.integrations.accelerate import prepare_outer
    from gossamer.integrations.lightning import LightningCallback
    from gossamer.integrations.transformers import TransformersCallback

    os.environ["GOSSAMER_SITE"], found = f"{site}/2", {}

    def meet(port):
        os.environ["GOSSAMER_OUTER"] = f"diloco:2@127.0.0.1:{port}"

    meet(ports[0])
    args = TrainingArguments("by-environment", max_steps=4, report_to="none", save_strategy="no", use_cpu=True)
    callback = TransformersCallback()
    Trainer(llama(), args, train_dataset=texts()[site::2], callbacks=[callback]).train()
    found["transformers"] = (callback.outer.n, callback.outer.rounds, flat(callback.outer.model))
    meet(ports[1])
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(net(), adam(model := net()))
    outer = prepare_outer(accelerator, model)
    for _ in range(4):
        accelerator.backward(loss_of(model, (torch.full((2, 3), 1.0 + site),)))
        optimizer.step()
        optimizer.zero_grad()
        outer.step()
    found["accelerate"] = (outer.n, outer.rounds, flat(model))
    outer.close()
    meet(ports[2])
    callback, module = LightningCallback(), lightning_module(net())
    options = {"enable_checkpointing": False, "logger": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(accelerator="cpu", devices=1, max_steps=4, callbacks=[callback], **options)
    trainer.fit(module, DataLoader([numbers()[k] for k in range(site, 16, 2)], batch_size=2))
    found["lightning"] = (callback.outer.n, callback.outer.rounds, flat(module))
    torch.save(found, f"by-environment-{site}.pt")


def work_in_two(argv):
    """`work` in two forks of a process that has imported what both need, without Lightning, which looks for its rank then.

    Then the example in three, and two sites.
    """
    sys.modules["datasets"] = None  # type: ignore[assignment]  # the Trainer imports it, and pandas, where it is there
    from transformers import LlamaForCausalLM, Trainer  # noqa: F401

    for name in ("accelerate", "torchmetrics"):
        importlib.import_module(name)
    return (
        in_forks(2, lambda rank: work(rank, argv[0], json.loads(argv[6])))
        or in_forks(3, lambda rank: train_the_example(rank, argv[1]))
        or in_forks(2, lambda site: train_a_site(site, f"127.0.0.1:{argv[2]}"))
        or in_forks(2, lambda site: train_as_the_environment_says(site, argv[3:6]))
    )


@pytest.fixture(scope="module")
def worked(request, tmp_path_factory):
    """The folder of the two workers, and all that was said."""
    folder = tmp_path_factory.mktemp("integrations")
    with_some_in_flight = test_stopped_with_exchanges_in_flight_it_trains_to_the_bits_of_a_plain_loop_too.__name__
    cases = [item for item in request.session.items if getattr(item, "originalname", "") == with_some_in_flight]
    late = [item.callspec.params["name"] for item in cases]
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(2)]
    with contextlib.chdir(folder):
        ports = [store.port for store in stores]
        code, output = Command(
            *ports, *(free_port() for _ in range(4)), json.dumps(late), work=work_in_two, GLOO_SOCKET_IFNAME=loopback()
        ).finish(290.0)
    assert code == 0, output
    return folder, output


@pytest.fixture(scope="module")
def found(worked):
    """What the two workers found."""
    return [torch.load(worked[0] / f"found-{worker}.pt") for worker in range(2)]


def test_the_example_trains_alone_and_under_torchrun(worked):
    """Under what torchrun sets in the environment: `test_resume` has its agent."""
    for worker in ("0 of 1", "0 of 2", "1 of 2"):
        assert f"worker {worker}, step 20: loss" in worked[1], worked[1]
    assert len(EXAMPLE.read_text().splitlines()) < 60


FRAMEWORKS = list(SCRIPTS)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_workers_are_apart_within_a_round_and_alike_after_it(found, name):
    one, two = (each[name]["trace"] for each in found)
    alike = [torch.equal(a, b) for a, b in zip(one[::BATCHES], two[::BATCHES], strict=True)]
    assert alike == [step % 3 == 0 for step in range(13)]


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_stopped_within_a_round_and_started_again_it_trains_to_the_bits_of_a_plain_loop(found, name):
    for each in found:
        trace, plain = each[name]["trace"], each[name]["plain"]
        assert len(trace) == 12 * BATCHES + 1
        assert [torch.equal(a, b) for a, b in zip(trace, plain, strict=True)] == [True] * len(trace)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_stopped_with_exchanges_in_flight_it_trains_to_the_bits_of_a_plain_loop_too(found, name):
    for each in found:
        trace, plain = each[name, "late"]["trace"], each[name, "late"]["plain"]
        assert len(trace) == 12 * BATCHES + 1
        assert [torch.equal(a, b) for a, b in zip(trace, plain, strict=True)] == [True] * len(trace)
        assert not torch.equal(trace[-1], each[name]["trace"][-1])


@pytest.mark.parametrize(
    ("injure", "why"),
    [
        (lambda path: path.with_suffix(".json").unlink(), r"worker-000\.json"),
        (lambda path: path.with_suffix(".json").write_bytes(b'{"format": "goss'), r"worker-000\.json"),
        (lambda path: path.write_bytes(path.read_bytes()[:-4]), "is cut short: it has"),
        (lambda path: path.unlink(), r"worker-000\.safetensors"),
    ],
)
def test_an_outer_state_that_was_written_in_part_is_called_so_and_not_absent(injure, why, tmp_path):
    outer = Outer(net(), "diloco", local_steps=1)
    for _ in range(2):  # of one folder the newest counts
        outer.step()
        save_outer(outer, tmp_path / "outer", {})
    assert load_outer(tmp_path / "outer", {})["rounds"] == 2
    injure(tmp_path / "outer" / "round-000002" / "worker-000.safetensors")
    with pytest.raises(
        CheckpointError, match=f"outer' has an outer state of worker 0 that is not whole: .*{why}.*; resume all"
    ):
        load_outer(tmp_path / "outer", {})


def test_a_checkpoint_has_the_outer_state_of_the_last_training_in_its_folder(tmp_path):
    for local_steps in (1, 3):  # of which the first is after more rounds
        outer = Outer(net(), "diloco", local_steps=local_steps)
        for _ in range(6):
            outer.step()
        save_outer(outer, tmp_path / "outer", {})
    outer.load_state_dict(load_outer(tmp_path / "outer", {}))
    assert outer.rounds == 2


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_workers_see_other_samples(found, name):
    one, two = ({tuple(row.tolist()) for batch in each[name]["batches"] for row in batch} for each in found)
    assert len(one) == len(two) == 32 and not one & two


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_framework_that_counts_two_processes_is_refused_in_a_sentence(found, name):
    for each in found:
        assert "counts 2 processes" in each["refusals"][name] and "as_worker() before" in each["refusals"][name]
        ways = (
            "saves what a callback has of its first process alone"
            if name == "lightning"
            else "give site=(0, 2) and join="
        )
        assert ways in each["refusals"][name]


def test_accelerate_exports_all_parameters_though_they_share_one_buffer(found):
    for each in found:
        exported = torch.cat([t.flatten() for t in each["accelerate"]["exported"].values()]).cpu()
        assert torch.equal(exported.sort().values, each["accelerate"]["trace"][-1].sort().values)


def test_the_trainer_is_refused_a_changing_batch_size_and_a_checkpoint_without_an_outer_state(found):
    for worker, each in enumerate(found):
        changing, without = each["refused"]
        assert "auto_find_batch_size" in changing and "set it to False" in changing
        assert f"checkpoint-8/outer' has no outer state of worker {worker} of 2" in without


def test_the_trainer_is_refused_checkpoints_that_callbacks_do_not_see(tmp_path):
    from transformers import TrainingArguments

    from gossamer.integrations.transformers import TransformersCallback

    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", enable_jit_checkpoint=True)
    with pytest.raises(
        ConfigError, match=r"enable_jit_checkpoint = True saves .* without the outer state, .*; set it to"
    ):
        TransformersCallback("diloco").on_train_begin(args, SimpleNamespace(), SimpleNamespace())


def test_the_processes_of_a_site_that_a_framework_counts_one_by_one_are_refused(monkeypatch):
    from gossamer.integrations.accelerate import prepare_outer
    from gossamer.integrations.lightning import LightningCallback
    from gossamer.integrations.transformers import TransformersCallback

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    given = {"site": (0, 2), "join": "127.0.0.1:1"}
    counted = SimpleNamespace(world_size=1, num_processes=1)
    for begin in (
        lambda: TransformersCallback("diloco", **given).on_train_begin(counted, SimpleNamespace(), SimpleNamespace()),
        lambda: LightningCallback("diloco", **given).setup(counted, None, "fit"),
        lambda: prepare_outer(counted, net(), "diloco", **given),
    ):
        with pytest.raises(
            ConfigError, match=r"counts 1 and this site has 8 processes, .*; leave as_worker\(\) out, or"
        ):
            begin()


def test_accelerate_resumes_within_an_epoch_with_the_samples_of_the_uninterrupted_run(tmp_path, monkeypatch):
    """At batch 6 of the 10 of an epoch, and again in the next."""
    from accelerate.state import AcceleratorState

    samples = TensorDataset(torch.randn(40, 3, generator=torch.Generator().manual_seed(1)))
    code = SCRIPTS["accelerate"].replace("3000", "12").replace("% 500", "% 4").replace("=30", "=2")
    code = code.replace("steps % 4", "steps in (3, 8)")

    def train(crash=None):
        recorder = Recorder(net(), crash)
        names = {"model": recorder.model, "optimizer": adam(recorder.model), "dataset": samples, "loss_of": loss_of}
        with contextlib.suppress(Crash):
            exec(code.replace(" == 0:", ":"), names)
        AcceleratorState._reset_state(reset_partial_state=True)
        return [args[0] for args, _ in recorder.calls]

    folders = [tmp_path / "whole", tmp_path / "parts"]
    for folder in folders:
        folder.mkdir()
    monkeypatch.chdir(folders[0])
    whole = train()
    monkeypatch.chdir(folders[1])
    first, second, third = train(crash=4), train(crash=6), train()
    seen = [*first[: 3 * BATCHES], *second[: 5 * BATCHES], *third]
    assert len(seen) == len(whole) == 12 * BATCHES
    assert [torch.equal(a, b) for a, b in zip(seen, whole, strict=True)] == [True] * len(whole)
    assert len({tuple(row.tolist()) for batch in seen[:10] for row in batch}) == 40
    assert not torch.equal(torch.stack(whole[:10]), torch.stack(whole[10:20]))  # another order in the next epoch


@pytest.mark.parametrize("name", ["transformers", "lightning"])
def test_a_training_without_a_whole_round_is_refused_when_it_begins(found, worked, name):
    for each in found:
        said = each["short"][name]
        assert (
            "training takes 3 optimizer steps and a round has 4, so that none would end and the 2 workers"
            in said["none"]
        )
        assert said["rounds"] == 1
        assert "workers take 4 to 5 optimizer steps, and those that take more would wait" in said["uneven"]
    for worker in range(2):
        assert (
            f"the last 2 of 6 optimizer steps of worker {worker} will not be exchanged, as a round has 4" in worked[1]
        )


def test_the_log_of_a_framework_has_the_rounds(found):
    assert found[0]["transformers"]["rounds"] == [*(step // 3 for step in range(1, 13)), 4]
    assert found[0]["lightning"]["rounds"] == [4.0, 5.0]  # a second `fit` continues


def test_workers_that_resume_from_different_steps_are_refused_with_their_steps(found):
    assert {each["steps"] for each in found} == {
        "workers resume from different steps: worker 0 from step 0, worker 1 from step 4; name a checkpoint that all of them "
        "have, or start all of them from the beginning"
    }


def ours(code):
    """The calls of Gossamer in a piece of code."""
    names = {"as_worker", "shard", "TransformersCallback", "prepare_outer", "LightningCallback"}
    calls = [node for node in ast.walk(ast.parse(textwrap.dedent(code))) if isinstance(node, ast.Call)]
    return {ast.unparse(call) for call in calls if ast.unparse(call.func).split(".")[-1] in names}


def test_the_recipe_of_a_module_is_what_the_page_runs():
    assert FRAMEWORKS == ["transformers", "accelerate", "lightning"]
    for name, code in SCRIPTS.items():
        source = (Path(gossamer.__file__).parent / "integrations" / f"{name}.py").read_text(encoding="utf-8")
        recipe = source.split("\n\n")[1]
        assert len(ours(recipe)) == 3 and ours(recipe) == ours(code), name


def test_options_are_the_arguments_of_outer():
    arguments = set(inspect.signature(gossamer.Outer.__init__).parameters) - {"self", "model", "rule"}
    assert set(OuterOptions.__annotations__) == arguments


class Stream(IterableDataset):
    """Samples without a length."""

    def __iter__(self):
        return iter(range(3))


def test_shards_are_disjoint_equally_long_and_of_the_same_kind():
    datasets = pytest.importorskip("datasets")
    shards = [Place(worker, 3).shard(range(11)) for worker in range(3)]
    assert [list(shard) for shard in shards] == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    table = datasets.Dataset.from_dict({"x": list(range(11))})
    assert Place(1, 3).shard(table)["x"][:] == [1, 4, 7]
    with pytest.raises(ConfigError, match=r"a Stream, which has no length; .*split_dataset_by_node\(dataset, 1, 3\)"):
        Place(1, 3).shard(Stream())
    numbers = torch.arange(22).view(11, 2)  # a tensor has a `select` too
    assert torch.equal(torch.stack([*Place(1, 3).shard(numbers)]), numbers[[1, 4, 7]])
    for wrong in ({"x": [1, 2, 3]}, datasets.DatasetDict(train=table, test=table), {1, 2, 3}):
        with pytest.raises(ConfigError, match=f"shard got a {type(wrong).__name__}, whose samples have no numbers"):
            Place(0, 1).shard(wrong)
    with pytest.raises(ConfigError, match="2 samples for 3 workers"):
        Place(1, 3).shard(range(2))


@pytest.mark.skipif(not [*metadata.distributions(name="gossamer")], reason="gossamer is imported and not installed")
@pytest.mark.parametrize(("name", "package"), [("transformers", "transformers"), ("lightning", "lightning.pytorch")])
def test_without_its_framework_a_module_says_what_to_install(monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"gossamer.integrations.{name}", raising=False)
    with pytest.raises(MissingPackageError, match=r"needs the extra 'integrations' .* pip install 'accelerate>="):
        importlib.import_module(f"gossamer.integrations.{name}")


def test_two_sites_in_lightning_end_with_the_same_weights(worked):
    ours, theirs = (torch.load(worked[0] / f"site-{site}.pt") for site in range(2))
    assert ours["rounds"] == theirs["rounds"] == 2
    assert all(torch.equal(t, theirs["state"][name]) for name, t in ours["state"].items())
    assert not torch.equal(ours["state"]["net.0.weight"], net()[0].weight)


@pytest.mark.parametrize("name", ["transformers", "accelerate", "lightning"])
def test_an_unchanged_script_of_each_framework_joins_another_by_one_variable(worked, name):
    ours, theirs = (torch.load(worked[0] / f"by-environment-{site}.pt")[name] for site in range(2))
    assert ours[:2] == theirs[:2] == (2, 2)  # workers that each has counted, and rounds
    assert torch.equal(ours[2], theirs[2])


MPI = {"MASTER_ADDR": "127.0.0.1"}
STARTED = {
    "torchrun inside mpirun": {
        "RANK": "{rank}",
        "LOCAL_RANK": "{rank}",
        "WORLD_SIZE": "2",
        **MPI,
        "OMPI_COMM_WORLD_SIZE": "2",
        "PMIX_RANK": "{rank}",
        "OMPI_COMM_WORLD_RANK": "{rank}",
        "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}",
        "PMI_RANK": "{rank}",
        "PMI_SIZE": "2",
    },
    "torchrun inside a batch job of Slurm": {
        "RANK": "{rank}",
        "LOCAL_RANK": "{rank}",
        "WORLD_SIZE": "2",
        **MPI,
        "SLURM_NTASKS": "2",
        "SLURM_JOB_ID": "7",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NNODES": "1",
        "SLURM_JOB_NAME": "train",
    },
    "Open MPI": {
        **MPI,
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": "{rank}",
        "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    },
    "MVAPICH": {
        **MPI,
        "MV2_COMM_WORLD_SIZE": "2",
        "MV2_COMM_WORLD_RANK": "{rank}",
        "MV2_COMM_WORLD_LOCAL_RANK": "{rank}",
    },
    "Intel MPI": {**MPI, "PMI_SIZE": "2", "PMI_RANK": "{rank}", "MPI_LOCALRANKID": "{rank}", "MPI_LOCALNRANKS": "2"},
    "mpiexec of Cray's PALS": {
        **MPI,
        "PMI_SIZE": "2",
        "PMI_RANK": "{rank}",
        "PALS_RANKID": "{rank}",
        "PALS_LOCAL_RANKID": "{rank}",
        "PALS_LOCAL_SIZE": "2",
    },
    "jsrun": {
        **MPI,
        "LSB_JOBID": "7",
        "LSB_DJOB_RANKFILE": "/tmp/ranks",
        "JSM_NAMESPACE_SIZE": "2",
        "JSM_NAMESPACE_RANK": "{rank}",
        "JSM_NAMESPACE_LOCAL_RANK": "{rank}",
    },
    "flux run": {**MPI, "FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "{rank}", "FLUX_TASK_LOCAL_ID": "{rank}"},
    "srun": {
        **MPI,
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": "{rank}",
        "SLURM_LOCALID": "{rank}",
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_JOB_NAME": "train",
    },
}
"""What launchers set, by their names; Slurm also sets SLURM_NTASKS alone, which Lightning refuses."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("launcher", STARTED)
def test_whatever_launcher_has_started_two_workers_each_framework_counts_one_process(launcher):
    from accelerate.utils.environment import get_cpu_distributed_information
    from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

    port = str(free_port())

    def check(rank):
        for name in [name for name in os.environ if name in COUNTED or name.startswith(FAMILIES)]:
            del os.environ[name]
        os.environ |= {name: value.format(rank=rank) for name, value in STARTED[launcher].items()}
        os.environ["MASTER_PORT"] = port
        _take_numbers()
        assert os.environ["LOCAL_RANK"] == str(rank)  # by which a worker takes its GPU
        assert as_worker(60.0) == Place(rank, 2)
        assert not any(name.startswith(("PALS_", "PMI", "SLURM_", "JSM_", "FLUX_", "OMPI_")) for name in os.environ)
        counted = get_cpu_distributed_information()
        assert (counted.rank, counted.world_size, counted.local_world_size) == (0, 1, 1)
        assert not SLURMEnvironment.detect() and not TorchElasticEnvironment.detect()
        connector = _AcceleratorConnector(accelerator="cpu", devices=1)
        assert isinstance(connector.cluster_environment, LightningEnvironment)
        dist.barrier()  # one that ended while the other still connects would be missed

    assert in_forks(2, check) == 0


@pytest.mark.parametrize("launcher", [name for name in STARTED if not name.startswith("torchrun")])
def test_a_process_of_another_launcher_is_not_alone_in_silence(launcher, monkeypatch):
    for name in [name for name in os.environ if name in COUNTED or name.startswith((*FAMILIES, "MASTER_"))]:
        monkeypatch.delenv(name)
    for name, value in STARTED[launcher].items():
        monkeypatch.setenv(name, value.format(rank=0))
    with pytest.raises(ConfigError, match=r"is 2 and WORLD_SIZE is not set, so each of the 2 processes.*as_worker"):
        gossamer.Outer(net(), gossamer.diloco())
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert gossamer.Outer(net(), gossamer.diloco()).n == 1


def test_a_script_in_the_shell_of_a_batch_job_is_alone_and_a_process_of_mpirun_without_an_address_is_refused(
    monkeypatch,
):
    for name in [*os.environ]:
        if name in COUNTED or name.startswith((*FAMILIES, "MASTER_")):
            monkeypatch.delenv(name)
    for name, value in {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"}.items():
        monkeypatch.setenv(name, value)
    assert gossamer.Outer(net(), gossamer.diloco()).n == 1
    assert as_worker() == Place(0, 1) and "SLURM_NTASKS" not in os.environ
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    with pytest.raises(ConfigError, match=r"MASTER_ADDR, MASTER_PORT is not set.*set MASTER_ADDR and MASTER_PORT"):
        as_worker()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        del os.environ[name]


def test_all_workers_resume_from_the_newest_checkpoint_that_all_have(found):
    assert [each["common"] for each in found] == [("checkpoint-10", 0)] * 2


@pytest.mark.parametrize(
    ("kept", "every", "warned"),
    [(1, 500, 2), (2, 500, None), (0, 500, None), (2, 10, 4), (3, 10, 4), (4, 10, None), (1, 0, 2)],
)
def test_too_few_checkpoints_for_a_death_between_two_saves_are_warned_of(kept, every, warned, caplog):
    outer = SimpleNamespace(n=2, local_steps=30)
    warn_of_few_checkpoints(outer, kept, every, "save_total_limit")
    told = [] if warned is None else [f"save_total_limit is {kept}, "]
    assert [one[: len(f"save_total_limit is {kept}, ")] for one in caplog.messages] == told
    assert all(one.endswith(f"at least {warned}") for one in caplog.messages)
    warn_of_few_checkpoints(SimpleNamespace(n=1, local_steps=30), 1, 500, "save_total_limit")
    assert len(caplog.messages) == len(told), "a worker alone has nobody to wait for"


@pytest.mark.parametrize("limit", [1, 2])
def test_the_callback_of_the_trainer_looks_how_many_checkpoints_it_keeps(limit, tmp_path, monkeypatch, caplog):
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from gossamer.integrations import transformers as ours

    monkeypatch.setattr(ours, "begin_outer", lambda *_, **__: SimpleNamespace(n=2, local_steps=3))
    monkeypatch.setattr(ours, "must_have_rounds", lambda *_: None)
    args = TrainingArguments(str(tmp_path), save_steps=500, save_total_limit=limit, report_to="none", use_cpu=True)
    state, model = TrainerState(max_steps=9, save_steps=500), net()
    ours.TransformersCallback("diloco").on_train_begin(
        args, state, TrainerControl(), model=model, optimizer=adam(model)
    )
    assert any("save_total_limit is 1" in one for one in caplog.messages) == (limit == 1), caplog.messages


def train_alone(folder, resume=None, **options):
    """The model and the state of a Trainer of one worker, with an exchange in flight after every checkpoint."""
    from transformers import Trainer, TrainingArguments

    from gossamer.integrations.transformers import TransformersCallback

    shared = {"max_steps": 6, "report_to": "none", "use_cpu": True, "disable_tqdm": True, "learning_rate": 0.05}
    args = TrainingArguments(str(folder), **{**shared, "save_strategy": "steps", "save_steps": 3, **options})
    callback = TransformersCallback("diloco", local_steps=3, schedule=LATE)
    trainer = Trainer(llama(), args, train_dataset=texts(), eval_dataset=texts()[:8], callbacks=[callback])
    trainer.train(resume_from_checkpoint=resume)
    return trainer.model, trainer.state


def test_the_best_model_of_the_trainer_stays_as_it_was_saved(tmp_path):
    best = {"eval_strategy": "steps", "eval_steps": 3, "metric_for_best_model": "loss", "load_best_model_at_end": True}
    model, state = train_alone(tmp_path, **best)
    saved = load_file(Path(state.best_model_checkpoint) / "model.safetensors")
    assert all(torch.equal(p, saved[name]) for name, p in model.named_parameters() if name in saved)


def test_the_outer_state_is_that_of_the_checkpoint_that_train_was_given(tmp_path):
    """Neither that of another run's step in the folder of this one, nor that which the arguments name beside it."""
    model, _ = train_alone(tmp_path / "a")
    train_alone(tmp_path / "b", learning_rate=0.5)
    for other in ({}, {"resume_from_checkpoint": str(tmp_path / "a" / "checkpoint-6")}):
        again, _ = train_alone(tmp_path / "b", str(tmp_path / "a" / "checkpoint-3"), save_strategy="no", **other)
        assert torch.equal(flat(again), flat(model))


@pytest.mark.parametrize(("options", "warns"), [({"save_last": True}, True), ({"save_top_k": -1}, False)])
def test_the_callback_of_lightning_looks_how_many_checkpoints_are_kept(options, warns, tmp_path, caplog):
    from lightning.pytorch.callbacks import ModelCheckpoint

    from gossamer.integrations import lightning as ours

    trainer = SimpleNamespace(checkpoint_callbacks=[ModelCheckpoint(tmp_path, every_n_train_steps=500, **options)])
    ours._warn_of_few_checkpoints(trainer, SimpleNamespace(n=2, local_steps=30))
    assert any("save_top_k of ModelCheckpoint is 1" in one for one in caplog.messages) == warns


@pytest.mark.parametrize(("optimizers", "max_steps", "known"), [(1, 6, True), (2, 6, False), (2, -1, True)])
def test_max_steps_of_lightning_are_not_those_of_rounds_where_it_counts_two_optimizers(optimizers, max_steps, known):
    from gossamer.integrations.lightning import _steps_in_all

    counted = {"optimizers": [None] * optimizers, "max_steps": max_steps, "estimated_stepping_batches": 6}
    assert _steps_in_all(SimpleNamespace(callbacks=[], **counted)) == (6 if known else float("inf"))
