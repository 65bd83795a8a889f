"""Gossamer with Accelerate: one function, and a folder for each worker.

    place = as_worker()                                        # before Accelerator
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(place.shard(dataset), batch_size=8))
    outer = prepare_outer(accelerator, model, "diloco", local_steps=30)
    for batch in loader:
        with accelerator.accumulate(model):
            ...                                                # backward, optimizer.step, optimizer.zero_grad as ever
        if accelerator.sync_gradients:
            outer.step()

Start it with `torchrun --nproc-per-node 2 train.py`.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import Unpack

from gossamer.integrations.begin import (
    let_every_worker_save,
    load_outer,
    must_be_alone,
    must_count_the_site,
    must_resume_alike,
    save_outer,
    warn_of_copies,
)
from gossamer.integrations.environment import rule_and_options
from gossamer.library import Outer, OuterMethod, OuterOptions, OuterState
from gossamer.rules import Rule

if TYPE_CHECKING:
    from accelerate import Accelerator


def prepare_outer(
    accelerator: "Accelerator",
    model: nn.Module,
    rule: str | Rule | OuterMethod | None = None,
    **options: Unpack[OuterOptions],
) -> Outer[nn.Module]:
    """Makes the Outer of a prepared model, which `accelerator.save_state` saves and `accelerator.load_state` loads.

    Call it after `accelerator.prepare`, which moves the model to its device. All workers call `load_state` together, before the
    first step. Accelerate unpickles what was registered with it, so load no checkpoint of a stranger.

    With `site=(0, 2), join="HOST:PORT"` a worker is all processes of one `torchrun`, over which Accelerate shards the model by
    FSDP2; each process has its outer state in the folder `outer` of the checkpoint.

    Args: as of `gossamer.Outer`, with the rule and its options from GOSSAMER_OUTER where none is given.
    Raises: ConfigError if the accelerator, without a site, counts several processes, and what Outer raises; `load_state` raises
        CheckpointError if workers resume from different steps or the state does not fit.
    Cost: that of Outer.
    """
    rule, options = rule_and_options(rule, options)
    processes = accelerator.num_processes
    must_be_alone(processes, "Accelerate", options)
    must_count_the_site(processes, "Accelerate", options)
    inner_model = accelerator.unwrap_model(model)
    asked = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"  # as Accelerator(fsdp_plugin=...) sets it too
    warn_of_copies(inner_model, processes, "Accelerate", asked=asked)
    if processes == 1:
        let_every_worker_save(inner_model)
    outer = Outer(inner_model, rule, **options)
    if processes == 1:
        accelerator.register_for_checkpointing(_Registered(outer, options))
    else:
        one = _RegisteredProcess(outer, options)
        accelerator.register_save_state_pre_hook(one.save)
        accelerator.register_load_state_pre_hook(one.look_in)
        accelerator.register_for_checkpointing(one)
    return outer


class _Registered(NamedTuple):
    """The state that Accelerate saves and loads of an Outer."""

    outer: Outer[nn.Module]
    options: OuterOptions

    def state_dict(self) -> OuterState:
        return self.outer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        outer = self.outer
        outer.load_state_dict(state)
        must_resume_alike(outer.steps_taken, outer.model, self.options.get("process_group"))


class _RegisteredProcess:
    """The file that one of several processes of a worker saves and loads, as Accelerate writes one for all."""

    def __init__(self, outer: Outer[nn.Module], options: OuterOptions) -> None:
        self._outer, self._options, self._folder = outer, options, Path()

    def save(self, models: list[nn.Module], weights: list[dict[str, Tensor]], folder: str) -> None:
        """Called in `save_state`."""
        save_outer(self._outer, Path(folder) / "outer", self._options)

    def look_in(self, models: list[nn.Module], folder: str) -> None:
        """Called in `load_state`, perhaps before the model is loaded."""
        self._folder = Path(folder) / "outer"

    def state_dict(self) -> dict[str, int]:
        """The state that Accelerate writes for all processes."""
        return {"processes": dist.get_world_size()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Called at the end of `load_state`."""
        self._outer.load_state_dict(load_outer(self._folder, self._options))
        must_resume_alike(self._outer.steps_taken, self._outer.model, None)
