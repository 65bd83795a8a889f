"""Checks of a model that the user's code trains: no wrapper averages its gradients, and all workers start alike."""

import hashlib
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from gossamer.collector import instances_of, subclasses_of
from gossamer.errors import ConfigError, PeerError
from gossamer.layout import bare_name
from gossamer.library.dtensors import as_dtensor, local

Rest = Literal["compare", "broadcast", "own"]
"""How frozen parameters and buffers, which are never exchanged, are treated at the start: compared, taken from worker 0, or
left as each worker has them."""
IN_STEP, ENGINE = "DistributedDataParallel", "DeepSpeedEngine"
ZERO = ("ds_id", "_hp_mapping")
"""Attributes that DeepSpeed's ZeRO-3, and ZeRO-1 and -2, add to a parameter."""
COPIES = (
    "whose optimizer trains copies or parts of its own, so that an outer step would be lost without a word; let DeepSpeed train "
    "in fp32 with zero_optimization.stage = 0, take torch's ZeroRedundancyOptimizer, or shard the model over the processes of "
    "one worker with torch.distributed.fsdp.fully_shard (FSDP2), which Outer finds by itself"
)
SHARDED = "FullyShardedDataParallel"
UNWRAPPED = (
    "train the module itself; with the Hugging Face Trainer, Accelerate or Lightning, call gossamer.integrations.as_worker() "
    "before anything of the framework is made, so that it counts one process"
)
_NEVER_INSIDE = {
    SHARDED: "whose flat parameters nobody can tell apart; shard it over the processes of one worker with "
    "torch.distributed.fsdp.fully_shard (FSDP2) instead, which Outer finds by itself",
    ENGINE: "which trains it and which Outer does not step through; give Outer its engine.module, in fp32 and without ZeRO, in "
    "a world of processes that is one worker (site=..., join=...)",
    IN_STEP: f"which averages gradients in every step, so that workers would train as one; {UNWRAPPED}",
}
"""Reasons to refuse a wrapped model, by the class of the wrapper: its package need not be installed."""
MOST_FINGERPRINTS = 4096


def must_be_trainable(model: object, owner: str = "Outer") -> None:
    """Raises ConfigError for an object that is no module, is wrapped for synchronous training, or does not fit a flat buffer."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{owner} got a {type(model).__name__} as model; it takes a torch.nn.Module: give the module")
    _refuse_wrapper_in(model)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if lazy := [name for name, t in tensors if is_lazy(t)]:
        raise ConfigError(
            f"{owner} got a model with {len(lazy)} tensors whose shape the first batch will give (the first is '{lazy[0]}'); "
            "call the model once with a batch first"
        )
    if empty := [name for name, t in tensors if t.is_meta]:
        raise ConfigError(
            f"{owner} got a model with {len(empty)} tensors on the meta device, which have no numbers (the first is "
            f"'{empty[0]}'); load or initialise it first, as after model.to_empty(device=...)"
        )
    for name, p in model.named_parameters():
        if p.requires_grad and (kind := _not_flat(p)):
            raise ConfigError(
                f"{owner} got a model whose parameter '{name}' is {kind}, and exchanges dense real numbers of 16 to 64 bits; "
                "store it as such, or freeze it and exchange it yourself"
            )
    _refuse_shared_memory(model, owner)


def _refuse_shared_memory(model: nn.Module, owner: str) -> None:
    """Raises ConfigError where a trainable parameter and another tensor begin in the same memory, which `attach` would part."""
    begins = dict[int, str]()
    parameters = sorted(model.named_parameters(), key=lambda one: not one[1].requires_grad)
    for name, t in [*parameters, *model.named_buffers()]:
        if t.layout != torch.strided or not t.numel() or type(t.data) is not Tensor:
            continue
        if (other := begins.get(t.data_ptr())) is not None:
            raise ConfigError(
                f"{owner} got a model in which '{name}' shares the memory of parameter '{other}' and is another tensor, so that "
                "they would no longer be tied; tie them by the same Parameter, as in head.weight = embedding.weight, or "
                "give each its own memory with clone()"
            )
        if t.requires_grad:
            begins[t.data_ptr()] = name


def _not_flat(p: Tensor) -> str:
    """Why a parameter cannot be a view of a flat buffer of real numbers; empty if it can."""
    if p.layout != torch.strided:
        return f"sparse ({p.layout})"
    if p.is_complex():
        return f"complex ({p.dtype})"
    if p.dtype.itemsize < 2:
        return f"in {p.dtype}, which torch does not add"
    # A subclass keeps its numbers elsewhere.
    return f"a {type(p.data).__name__}" if type(p.data) is not Tensor and as_dtensor(p) is None else ""


def must_not_be_wrapped(model: nn.Module, workers: Collection[int]) -> None:
    """Refuses a DistributedDataParallel, or an engine of DeepSpeed, around the model's parameters, wherever it was made.

    Args: `workers` are the global ranks of all workers; a wrapper over the processes of one worker alone is in order.
    Raises: ConfigError with the ways in which three frameworks train without it.
    Cost: one look at every object of Python, about 0.1 s.
    """
    _refuse_wrapper_in(model)
    if not dist.is_initialized():
        return
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    kinds = {kind for kind in subclasses_of(nn.Module) if issubclass(kind, DistributedDataParallel) or _is_engine(kind)}
    for wrapper in instances_of(kinds):
        engine = _is_engine(type(wrapper))
        group = getattr(wrapper, "seq_data_parallel_group" if engine else "process_group", None)
        if group is None or trainable.isdisjoint(id(p) for p in wrapper.parameters()):
            continue  # one whose construction failed has no group
        if engine and (wrapper.fp16_enabled() or wrapper.bfloat16_enabled()):
            raise ConfigError(f"the model is trained by {ENGINE} in half precision, {COPIES}")
        if len(set(dist.get_process_group_ranks(group)) & set(workers)) > 1:
            raise ConfigError(
                f"the model is wrapped in {type(wrapper).__name__}, which averages the gradients of all workers in every step, "
                f"so that they train as one and rounds change nothing; {UNWRAPPED}"
            )


def _is_engine(kind: type) -> bool:
    return any(one.__name__ == ENGINE and one.__module__.partition(".")[0] == "deepspeed" for one in kind.__mro__)


def _refuse_wrapper_in(model: nn.Module) -> None:
    for module in model.modules():
        for kind in type(module).__mro__:
            if kind.__module__.partition(".")[0] in ("torch", "deepspeed") and kind.__name__ in _NEVER_INSIDE:
                raise ConfigError(f"the model is in {kind.__name__}, {_NEVER_INSIDE[kind.__name__]}")
    for name, p in model.named_parameters():
        if any(hasattr(p, mark) for mark in ZERO):
            raise ConfigError(f"parameter '{name}' is held by DeepSpeed's ZeRO, {COPIES}")


_HOLDERS = WeakTensorKeyDictionary()
"""Of each parameter the `Outer` that was made of it last, as a finalizer that is alive for as long as that is open."""


def take_hold(model: nn.Module, holder: "weakref.finalize[..., Any]") -> None:
    """Notes to whom the trainable parameters belong from now on."""
    for p in model.parameters():
        if p.requires_grad:
            _HOLDERS[p] = holder


def must_hold(model: nn.Module, holder: "weakref.finalize[..., Any]") -> None:
    """Raises ConfigError where another `Outer` that is open was made of the same parameters later."""
    owners = [(name, _HOLDERS.get(p)) for name, p in model.named_parameters()]
    if taken := [name for name, owner in owners if owner is not None and owner is not holder and owner.alive]:
        raise ConfigError(
            f"another Outer was made of parameter '{taken[0]}' while this one is open, so that each would undo the exchanges of "
            "the other; close this one before, or give each Outer a model with parameters of its own"
        )


def rest_of(model: nn.Module) -> dict[str, Tensor]:
    """Frozen parameters and buffers by name, or this process's part of them: they are never exchanged."""
    frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
    return {bare_name(name): local(t) for name, t in [*frozen, *model.named_buffers()]}


def fingerprints(tensors: Mapping[str, Tensor], *, numbers: bool) -> list[str]:
    """A short hash of each tensor's name, shape and dtype, and of its numbers if asked for; of many tensors, one hash of all."""
    hashes = []
    for name, t in tensors.items():
        seen = hashlib.blake2b(repr((name, tuple(t.shape), t.dtype)).encode(), digest_size=4)
        if numbers and t.numel():
            seen.update(_bytes_of(t if t.layout == torch.strided else t.to_dense()).numpy().data)
        hashes.append(seen.hexdigest())
    return hashes if len(hashes) <= MOST_FINGERPRINTS else [hashlib.blake2b("".join(hashes).encode()).hexdigest()]


def must_be_alike(of_workers: Sequence[object], names: Sequence[str]) -> None:
    """Raises PeerError when the workers' fingerprints differ, naming the first tensor that differs if it can be known."""
    others = [worker for worker, fingerprint in enumerate(of_workers) if fingerprint != of_workers[0]]
    if not others:
        return
    lists = [one for one in of_workers if isinstance(one, list) and len(one) == len(names)]
    odd = [name for name, *hashes in zip(names, *lists, strict=True) if len(set(map(str, hashes))) > 1]
    which = f", {len(odd)} of {len(names)} tensors and first '{odd[0]}'" if odd else ""
    raise PeerError(
        f"frozen parameters or buffers, which are never exchanged, differ from those of worker 0 on workers "
        f"{', '.join(map(str, others))}{which}; load the same on all, or give Outer rest='broadcast' to take those of worker 0, "
        "or rest='own' to keep them"
    )


def broadcast(tensor: Tensor, carry: Callable[[Tensor], None], carrier: torch.device) -> None:
    """Overwrites a tensor with that of the first worker: `carry` broadcasts flat bytes on this device."""
    if tensor.layout != torch.strided:
        raise ConfigError(
            f"a frozen parameter or buffer is sparse ({tensor.layout}), which rest='broadcast' does not send; load the same on "
            "all workers, and let rest='compare' see to it"
        )
    if tensor.numel():
        data = _bytes_of(tensor).to(carrier)
        carry(data)
        tensor.detach().copy_(data.to(tensor.device).view(tensor.dtype).view(tensor.shape))


def _bytes_of(t: Tensor) -> Tensor:
    return t.detach().cpu().reshape(-1).contiguous().view(torch.uint8)
