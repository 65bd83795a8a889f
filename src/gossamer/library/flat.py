"""How an `Outer` holds a model: one flat vector, which is the memory of its parameters or a copy of them."""

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gossamer.codecs import Codec
from gossamer.errors import ConfigError
from gossamer.layout import Layout, Leaf, arrange, attach, bare_name, keep_attached, layout_of
from gossamer.library.dtensors import as_dtensor, copied_over, like_parameter, local, reshard
from gossamer.rounds.schedule import Schedule
from gossamer.transport.wire import checksum


class Flat(Protocol):
    """The trainable parameters of a model as one flat vector."""

    x: Tensor
    layout: Layout
    spans: tuple[tuple[int, int], ...]
    """The slices of `x` that are the fragments of a schedule."""
    words: str
    """The sharding of the parameters over a worker's processes, for comparison between workers; empty for a worker of one."""

    @property
    def kept(self) -> list[Tensor]:
        """Tensors of the outer state in addition to those of the rule."""
        ...

    def read(self) -> None:
        """Brings `x` up to date with the parameters. Raises: ConfigError for a model whose structure has changed."""
        ...

    def write(self) -> None:
        """Brings the parameters up to date with `x`."""
        ...

    def named(self, leaf: Leaf, part: Tensor) -> tuple[str, Tensor]:
        """The name of a parameter and its part of a vector like `x`, as laid out over the worker's processes."""
        ...

    def showing(self, other: Tensor) -> contextlib.AbstractContextManager[None]:
        """A context in which the parameters are another flat vector; afterwards they are restored bit for bit."""
        ...

    def checksum(self) -> int:
        """Checksum of the parameters."""
        ...


def flat_of(model: nn.Module, mesh: DeviceMesh | None, schedule: Schedule) -> Flat:
    """Views where one vector can be the memory of all parameters, else copies: of shards, and of parameters of several dtypes."""
    kinds = {(p.dtype, as_dtensor(p) is None) for p in model.parameters() if p.requires_grad}
    if mesh is None and len(kinds) <= 1:
        return _Views(model, schedule)
    return _Copies(model, mesh, schedule)


def must_carry_copies(codec: Codec, held: Flat, shards: int) -> None:
    """Raises ConfigError for a lossy codec where processes of a worker exchange copies of one tensor: they would diverge."""
    alike = codec.exact or (codec.blockwise == 1 and not codec.draws)
    plain = held.without_dtensor if isinstance(held, _Copies) else []
    if shards > 1 and plain and not alike:
        raise ConfigError(
            f"codec '{codec.name}' cuts or draws what each of the {shards} processes of a worker sends, and {len(plain)} "
            f"parameters are plain tensors (the first is '{plain[0]}'), of which processes may have copies that would part; "
            "shard or replicate all as DTensors, or use a codec such as 'exact' or 'bf16'"
        )


def layouts_with_wrappers(model: nn.Module, layout: Layout) -> list[Layout]:
    """The layout under the parameter names that states up to 0.2.0 used for a compiled model.

    They are the names of this model as it is, and of the whole model in `torch.compile`.
    """
    full = {bare_name(name): name for name, _ in model.named_parameters()}
    return [
        layout._replace(leaves=tuple(leaf._replace(name=name(leaf.name)) for leaf in layout.leaves))
        for name in (lambda name: full.get(name, name), lambda name: f"_orig_mod.{name}")
    ]


@contextlib.contextmanager
def with_bare_names(model: nn.Module) -> Iterator[None]:
    """A context in which `state_dict` of a model with compiled parts has the names of the plain model, which can load it."""
    compiled = any(bare_name(name) != name for name, _ in model.named_parameters())
    inner = getattr(model, "_orig_mod", model)  # the owner of methods such as save_pretrained
    roots = {model, inner} if compiled else set()
    hooks = [root.register_state_dict_post_hook(_rename) for root in roots]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _rename(model: nn.Module, state: dict[str, Tensor], prefix: str, metadata: Mapping[str, object]) -> None:
    if len({*map(bare_name, state)}) < len(state):
        return
    # A wrapper and the module in it get one name; the module's version comes later and counts.
    for names in (state, getattr(state, "_metadata", {})):
        for name in [*names]:
            names[bare_name(name)] = names.pop(name)


class _Views:
    """One vector that is the memory of the parameters, which become views of it."""

    def __init__(self, model: nn.Module, schedule: Schedule) -> None:
        self._model = model
        self.layout, self.spans = arrange(layout_of(model), schedule.fragments, schedule.pattern)
        self.x = attach(model, self.layout, own_storage=True)
        self.words = ""
        self.kept = list[Tensor]()

    def read(self) -> None:
        """Takes back parameters that have left the vector."""
        for name, p in self._model.named_parameters():
            if as_dtensor(p) is not None:
                raise ConfigError(
                    f"parameter '{name}' became a DTensor after Outer was made, which counts this process as a whole worker; "
                    "shard the model before Outer is made"
                )
        keep_attached(self._model, self.layout, self.x)

    def write(self) -> None:
        """Does nothing: parameters and vector share memory."""

    def named(self, leaf: Leaf, part: Tensor) -> tuple[str, Tensor]:
        """See `Flat`."""
        return leaf.name, part.view(leaf.shape)

    @contextlib.contextmanager
    def showing(self, other: Tensor) -> Iterator[None]:
        """See `Flat`."""
        before = self.x.clone()
        try:
            with torch.no_grad():
                self.x.copy_(other)
            yield
        finally:
            with torch.no_grad():
                try:
                    self.read()
                finally:
                    self.x.copy_(before)

    def checksum(self) -> int:
        """See `Flat`."""
        return checksum(self.x.view(torch.uint8))


class _Copies:
    """A flat copy of the parameters, whose memory has another owner, such as FSDP2's shards.

    It has the local part of each parameter, in their dtype, or in fp32 (fp64) for mixed dtypes; then it also keeps the unrounded
    values of parameters in half precision. A parameter that several processes of the worker copy is exchanged by the first of
    them alone, so that it crosses between workers once, and is then broadcast inside the worker.

    Args:
        mesh: of the worker; None for one that is a single process.
    Cost: one copy of the local parts, and one of those in half precision among others; at each stop two copies of them.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh | None, schedule: Schedule) -> None:
        self._model = model
        reshard(model)
        self._parameters = {bare_name(name): p for name, p in model.named_parameters() if p.requires_grad}
        if not self._parameters:
            layout_of(model)  # which raises the error
        # Fragments are of whole tensors, so all processes of a worker assign the parts of a tensor to the same one.
        given = Layout.of((name, p.shape) for name, p in self._parameters.items())
        whole, spans = arrange(given, schedule.fragments, schedule.pattern)
        self._names = [leaf.name for leaf in whole.leaves]
        parts = [self._own_part(name) for name in self._names]
        self.layout = Layout.of((name, part.shape) for name, part in zip(self._names, parts, strict=True))
        ends = [0, *(leaf.stop for leaf in self.layout.leaves)]
        last = [max((k + 1 for k, leaf in enumerate(whole.leaves) if leaf.stop <= b), default=0) for _, b in spans]
        self.spans = tuple((ends[a], ends[b]) for a, b in pairwise([0, *last]))
        device, dtype = self._device_and_dtype()
        self.x = torch.empty(self.layout.numel, dtype=dtype, device=device)
        self._views = self._cut(self.x)
        self._rounded = [k for k, name in enumerate(self._names) if self._parameters[name].dtype != dtype]
        self.kept = [torch.empty_like(self._views[k]) for k in self._rounded]
        """Unrounded values that were last written to the parameters in half precision."""
        with torch.no_grad():
            self._copy(self._views, parts)
            self._keep()
        self.words = self._in_words(mesh)

    def _device_and_dtype(self) -> tuple[torch.device, torch.dtype]:
        """Those of the vector. Raises: ConfigError for parameters on several devices."""
        devices, dtypes = {p.device for p in self._parameters.values()}, {p.dtype for p in self._parameters.values()}
        if len(devices) > 1:
            raise ConfigError(
                f"the trainable parameters of {type(self._model).__name__} are on {len(devices)} devices ({devices}) in this "
                "process; one flat buffer needs one: move the model to one, or shard it over processes of one device each"
            )
        wide = torch.float64 if torch.float64 in dtypes else torch.float32
        return devices.pop(), dtypes.pop() if len(dtypes) == 1 else wide

    @property
    def without_dtensor(self) -> list[str]:
        """The parameters that are no DTensors: processes of a worker may hold copies or parts of them."""
        return [name for name, p in self._parameters.items() if as_dtensor(p) is None]

    def read(self) -> None:
        """Copies the local parts into the vector."""
        self._look()
        with torch.no_grad():
            parts = [self._own_part(name) for name in self._names]
            if not self._rounded:
                return self._copy(self._views, parts)
            for view, part in zip(self._views, parts, strict=True):
                view.copy_(part)
            for k, before in zip(self._rounded, self.kept, strict=True):
                # The change since then, added to the unrounded value.
                self._views[k].copy_(before + (self._views[k] - before.to(parts[k].dtype).to(before.dtype)))

    def write(self) -> None:
        """Copies the vector into the local parts, and discards what was gathered of them."""
        with torch.no_grad():
            self._keep()
            self._put(self._views)

    @contextlib.contextmanager
    def showing(self, other: Tensor) -> Iterator[None]:
        """See `Flat`."""
        before = [local(self._parameters[name]).clone() for name in self._names]
        try:
            with torch.no_grad():
                self._put(self._cut(other))
            yield
        finally:
            with torch.no_grad():
                self._look()
                self._copy([local(self._parameters[name]) for name in self._names], before)
                reshard(self._model)

    def checksum(self) -> int:
        """See `Flat`."""
        parts = [self._own_part(name).reshape(-1).contiguous().view(torch.uint8) for name in self._names]
        return checksum(torch.cat(parts)) if parts else 0

    def named(self, leaf: Leaf, part: Tensor) -> tuple[str, Tensor]:
        """See `Flat`: a view, whose DTensor has the mesh, placements and shape of the parameter.

        Raises: ConfigError for a parameter of which several processes have copies.
        """
        p = self._parameters[leaf.name]
        shared, view = as_dtensor(p), part.view(leaf.shape)
        if shared is None:
            return leaf.name, view
        if copied_over(shared):
            raise ConfigError(
                f"processes have copies of parameter '{leaf.name}', and its outer state is on the first of them alone; save "
                "Outer.state_dict() on each process instead"
            )
        return leaf.name, like_parameter(view, shared)

    def _own_part(self, name: str) -> Tensor:
        """The part of a parameter that this process exchanges: its local part, or nothing if an earlier process has the same."""
        p = self._parameters[name]
        part, shared = local(p), as_dtensor(p)
        if shared is not None:
            place = shared.device_mesh.get_coordinate()
            if place is None or any(place[d] for d in copied_over(shared)):
                return part.new_empty(0)
        return part

    def _cut(self, flat: Tensor) -> list[Tensor]:
        return [flat[leaf.start : leaf.stop].view(leaf.shape) for leaf in self.layout.leaves]

    def _keep(self) -> None:
        for k, before in zip(self._rounded, self.kept, strict=True):
            before.copy_(self._views[k])

    def _put(self, views: Sequence[Tensor]) -> None:
        self._copy([self._own_part(name) for name in self._names], views)
        self._give_copies()
        reshard(self._model)

    @staticmethod
    def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        torch._foreach_copy_([*targets], [*sources])  # pyright: ignore[reportPrivateImportUsage]

    def _give_copies(self) -> None:
        """Broadcasts copied parameters inside the worker, from the process that exchanged them."""
        same = dict[tuple[DeviceMesh, tuple[int, ...], torch.dtype], list[Tensor]]()
        for name in self._names:
            shared = as_dtensor(self._parameters[name])
            if shared is not None and (along := copied_over(shared)):
                same.setdefault((shared.device_mesh, along, shared.dtype), []).append(local(shared))
        for (mesh, along, _), parts in same.items():
            together = torch.cat([part.reshape(-1) for part in parts])
            for d in along:  # after the first dimension, all processes at coordinate 0 of the others have it
                dist.broadcast(together, group=mesh.get_group(d), group_src=0)
            pieces = together.split([part.numel() for part in parts])
            self._copy(parts, [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)])

    def _look(self) -> None:
        """Adopts parameters that replaced others, as `load_state_dict(assign=True)` does; refuses unsuitable ones."""
        reshard(self._model)  # otherwise gathered plain tensors stand in place of the DTensors
        for name, p in self._model.named_parameters():
            name = bare_name(name)
            known = self._parameters.get(name)
            if known is p:
                continue
            if known is None:
                if p.requires_grad:
                    raise ConfigError(
                        f"parameter '{name}' is trainable and was not when Outer was made, so it is not exchanged; make it "
                        "trainable before Outer is made, and freeze it afterwards for as long as you like"
                    )
                continue
            if _form(p) != _form(known):
                raise ConfigError(
                    f"parameter '{name}' is {_form(p)}, and was {_form(known)} when Outer was made; convert, move, resize or "
                    "shard the model before Outer is made"
                )
            self._parameters[name] = p

    def _in_words(self, mesh: DeviceMesh | None) -> str:
        if mesh is None:
            return ""
        places, seen = set[str](), hashlib.sha256()
        for name in self._names:
            shared = as_dtensor(self._parameters[name])
            how = "plain" if shared is None else " ".join(map(str, shared.placements))
            places.add(how)
            where = None if shared is None else (tuple(shared.device_mesh.shape), shared.device_mesh.get_coordinate())
            seen.update(repr((name, tuple(self._parameters[name].shape), how, where)).encode())
        return (
            f" at {mesh.get_coordinate()} of a mesh of {[*mesh.shape]}, placed {', '.join(sorted(places))}, hash "
            f"{seen.hexdigest()[:8]}"
        )


def _form(p: Tensor) -> str:
    shared = as_dtensor(p)
    return f"{p.dtype} {[*p.shape]} on {p.device}{'' if shared is None else f' placed {shared.placements}'}"
