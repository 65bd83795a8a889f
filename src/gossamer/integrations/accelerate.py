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

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn
from typing_extensions import Unpack

from gossamer.integrations.begin import let_every_worker_save, must_be_alone, must_resume_alike
from gossamer.library import Outer, OuterMethod, OuterOptions, OuterState
from gossamer.rules import Rule

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["prepare_outer"]


def prepare_outer(
    accelerator: "Accelerator", model: nn.Module, rule: str | Rule | OuterMethod, **options: Unpack[OuterOptions]
) -> Outer[nn.Module]:
    """Makes the Outer of a prepared model, which `accelerator.save_state` saves and `accelerator.load_state` loads.

    Call it after `accelerator.prepare`, which moves the model to its device. All workers call `load_state` together, before the
    first step. Accelerate unpickles what was registered with it, so load no checkpoint of a stranger.

    Args: as of `gossamer.Outer`.
    Raises: ConfigError if the accelerator counts several processes, and what Outer raises; `load_state` raises CheckpointError
        if workers resume from different steps or the state does not fit.
    Cost: that of Outer; `model.state_dict()` copies the parameters from now on, because Accelerate loses tensors that share
        memory.
    """
    must_be_alone(accelerator.num_processes, "Accelerate")
    own = accelerator.unwrap_model(model)
    let_every_worker_save(own)
    own.register_state_dict_post_hook(_own_memory)
    outer = Outer(own, rule, **options)
    accelerator.register_for_checkpointing(_Registered(outer, options))
    return outer


def _own_memory(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    """Gives each tensor of a state dict its own memory: Accelerate saves one of those that share a storage, and loses the others.

    Parameters that Outer has are views of one flat buffer, so all share it. Tied parameters stay tied.
    """
    copies: dict[tuple[object, ...], Tensor] = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):  # with keep_vars they are the parameters
            place = (value.data_ptr(), value.shape, value.stride(), value.dtype)
            if place not in copies:
                copies[place] = value.clone()
            state[name] = copies[place]


class _Registered(NamedTuple):
    """What Accelerate saves and loads of an Outer."""

    outer: Outer[nn.Module]
    options: OuterOptions

    def state_dict(self) -> OuterState:
        return self.outer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        outer = self.outer
        outer.load_state_dict(state)
        must_resume_alike(outer.steps_taken, outer.model, self.options.get("process_group"))
