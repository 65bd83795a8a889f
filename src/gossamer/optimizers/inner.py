"""The inner optimizer of one worker: its settings, its construction and its learning-rate schedule."""

import contextlib
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar, cast

import torch
from pydantic import AllowInfNan, Field
from torch import Tensor, _compile, nn
from torch.optim import SGD, AdamW, Muon, Optimizer

from gossamer.errors import ConfigError
from gossamer.layout import Layout
from gossamer.optimizers import GPA, AccoAdamW, AccumAdamW, InnerOptimizer, Joined, QHAdopt, SpectralMuon
from gossamer.optimizers.spectral_muon import is_fast_in_bf16
from gossamer.record.machines import computes_bf16
from gossamer.settings.fields import Changeable, OneOf
from gossamer.settings.options import Count, Decay, NotNegative, Number, Portion, Positive
from gossamer.settings.over_time import LearningRate
from gossamer.settings.schema import settings
from gossamer.settings.user_code import is_code

log = logging.getLogger("gossamer")

_GUARDED = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
T = TypeVar("T", bound=Optimizer)


def uncompiled(kind: type[T]) -> type[T]:
    """The same optimizer, to the last bit, for steps that are not compiled.

    torch (2.13) imports its compiler in order to keep it out of these functions and around every step. What it wraps is called
    here instead, without gradients as torch does. Where torch wraps nothing, this is the optimizer itself. Its attribute `plain`
    is the class that was given.

    >>> issubclass(uncompiled(torch.optim.SGD), torch.optim.SGD)
    True
    """
    return cast(type[T], _uncompiled(kind))


_WARMUP = 0.1
"""Share of all inner steps."""


OptimizerFactory = Callable[..., InnerOptimizer]
"""Makes the optimizer of these parameters: `optimizer(parameters)`."""


@functools.cache
def _uncompiled(kind: type[Optimizer]) -> type[Optimizer]:
    own: dict[str, Any] = {name: inspect.unwrap(getattr(kind, name)) for name in _GUARDED}
    step = torch.no_grad()(inspect.unwrap(kind.step))
    return type(kind.__name__, (kind,), {**own, "step": step, "__module__": kind.__module__, "plain": kind})


@contextlib.contextmanager
def without_compiler(functions: Iterable[Any]) -> Iterator[None]:
    """A context in which torch calls these functions without importing its compiler (a second) merely to disable it for
    them.

    Args:
        functions: those that torch has wrapped with `torch._disable_dynamo`; others are left as they are.
    """
    spared = []
    if "torch._dynamo" not in sys.modules:  # with it, calling them costs nothing more
        for function in functions:
            while (within := getattr(function, "__wrapped__", None)) is not None:
                if function.__code__ is _DISABLED.__code__ and _INSTEAD not in vars(own := _kept_out_of(function)):
                    setattr(own, _INSTEAD, own)
                    spared.append(own)
                function = within
    try:
        yield
    finally:
        for one in spared:
            if vars(one).get(_INSTEAD) is one:  # another thread may have imported the compiler meanwhile
                delattr(one, _INSTEAD)


def _kept_out_of(wrapper: Any) -> Any:
    """The function around which torch put this wrapper; `__wrapped__` may be another one, inside of it."""
    return wrapper.__closure__[wrapper.__code__.co_freevars.index("fn")].cell_contents


_DISABLED = _compile._disable_dynamo(lambda: None)
_INSTEAD = "__dynamo_disable"
"""The attribute in which torch keeps the wrapped form of a function with its compiler disabled."""


def _of_user(make: OptimizerFactory, parameters: list[nn.Parameter]) -> InnerOptimizer:
    """The optimizer that a user's function makes; one of torch's classes in its `uncompiled` form, with its hooks."""
    with without_compiler(getattr(Optimizer, name) for name in _GUARDED):
        made = make(parameters)
    if not isinstance(made, Optimizer):
        return made
    kind = type(made)
    known = getattr(torch.optim, kind.__name__, None) is kind
    if known and "step" not in vars(made) and not made.defaults.get("differentiable"):
        made.__class__ = _uncompiled(kind)
        made._patch_step_function()  # so that hooks are called around this step too
    return cast(InnerOptimizer, made)


@settings("inner")
class InnerConfig:
    """Settings of the training between two exchanges."""

    optimizer: Annotated[
        str, OneOf(("acco_adamw", "accum_adamw", "adamw", "muon", "qh_adopt", "sgd", "spectral_muon"), code=True)
    ] = "adamw"
    """muon is torch's Muon on the hidden matrices, the router of experts among them, and AdamW on all else, spectral_muon the
    same with the Muon of MuLoCo; accum_adamw is AdamW with moments of mean gradients, qh_adopt ADOPT with a slow
    momentum in addition to the gradient, and acco_adamw AdamW for the rule acco. "package.module:name" is a function of
    yours, or a class of torch's, called with the parameters, with `options`, and with those of lr, betas, eps,
    weight_decay, momentum and nesterov it takes."""
    options: Mapping[str, Any] | None = None
    """Keywords for your optimizer."""
    lr: Annotated[Positive, Changeable()] = 1e-3
    """Peak learning rate. The updates of muon are scaled to the size of AdamW's, so that one number serves both; those of
    spectral_muon are not, and MuLoCo takes 0.02."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay of AdamW's two moments per step, and of qh_adopt's, whose authors take 0.995 and 0.9999; schedule_free has
    no first moment, and its authors call mu_y β₁.
    """
    eps: Positive = 1e-8
    """The constant in the denominator of AdamW."""
    moments_every: Count = 4
    """Inner steps whose mean gradient makes one update of accum_adamw's moments (s); its authors take more for more workers."""
    slow_weight: Portion = 0.9
    """Weight of the slow momentum, relative to the gradient, in the step of qh_adopt (ω)."""
    weight_decay: NotNegative = 0.1
    """Decoupled decay per step and unit of learning rate (in sgd an L2 gradient); never on norms and biases."""
    momentum: Decay = 0.95
    """Momentum of muon, spectral_muon and sgd; none with schedule_free."""
    nesterov: bool = True
    """Whether the momentum of muon, spectral_muon and sgd looks ahead."""
    clip: Annotated[Annotated[float, Field(gt=0), AllowInfNan(True)] | None, Changeable()] = None
    """Largest global norm of a step's gradient; a longer one is shortened to it. Of gradients that are exchanged it is that of
    their mean, or, for `demo`, of each worker's. None never clips."""
    schedule: Annotated[Literal["cosine", "wsd", "constant"], Changeable()] = "cosine"
    """After the warm-up: a cosine to the end, a plateau with a linear decay at its end (wsd), or a plateau."""
    warmup_steps: Annotated[Number | None, Changeable()] = None
    """Inner steps in which the learning rate rises linearly; None is a tenth of the run. A shorter run is all warm-up."""
    min_lr_ratio: Annotated[Portion, Changeable()] = 0.1
    """Learning rate at the end over that at the peak."""
    decay_fraction: Annotated[float, Field(gt=0, le=1), Changeable()] = 0.2
    """The last part of the run in which wsd decays."""
    autocast: Literal["bf16"] | None = None
    """Lower precision for forward and backward; parameters and optimizer stay in fp32. Fast on GPUs and on
    processors with AMX tiles or the bf16 of ARM, and two to fifty times slower on others; `gossamer plan --race` takes it there
    alone."""
    compile: bool = False
    """Compile the forward and backward pass (needs a C++ compiler): faster, and the numbers differ by rounding. It
    waits for the compiler at first; `run.batched` does not."""
    averaging: Literal["gpa", "schedule_free"] | None = None
    """What is evaluated: an exponential average of the optimizer's iterates (gpa), their mean weighted by the squared learning
    rate (schedule_free, which steps without momentum and takes weight decay where it takes gradients), or the last."""
    mu_x: Decay = 0.9967
    """Weight of gpa's old average in the new one; `0.9^(1/H)` averages like a DiLoCo of one worker with H local steps."""
    mu_y: Portion = 0.7
    """Where between the last iterate (0) and the average (1) an averaging optimizer takes its gradients."""

    def __post_init__(self) -> None:
        if self.options is not None and not is_code(self.optimizer):
            raise ConfigError(
                f"inner.options is {dict(self.options)} and inner.optimizer is '{self.optimizer}', whose options are keys of "
                "[inner]; remove inner.options"
            )


def build_optimizer(
    config: InnerConfig,
    model: nn.Module,
    *,
    x: Mapping[nn.Parameter, Tensor] | None = None,
    z: Mapping[nn.Parameter, Tensor] | None = None,
    factory: OptimizerFactory | None = None,
) -> InnerOptimizer:
    """The optimizer for the trainable parameters of a model, which may be views of a flat buffer.

    Args:
        x, z: tensors for the average and the iterate of an averaging optimizer, as in `GPA`; None allocates them.
        factory: makes the optimizer, in place of the one that the settings name.

    AdamW and SGD run fused: on the CPU that was 1.3 ms a step against 2.7 with foreach and 2.9 in a loop (0.87M
    parameters in 39 tensors, one thread), and SGD 0.5 against 1.6 and 1.1.

    Raises: ConfigError when muon is asked for and the model has no hidden matrix.
    Source: Muon, https://kellerjordan.github.io/posts/muon/, with the scale of arXiv 2502.16982, section 2.2; `SpectralMuon`
        has its own.
    """
    base = (
        _stepper(without_momentum(config), model)
        if factory is None
        else _of_user(factory, [p for p in model.parameters() if p.requires_grad])
    )
    if config.averaging is None:
        return base
    return GPA(base, mu_x=config.mu_x if config.averaging == "gpa" else None, mu_y=config.mu_y, x=x, z=z)


def without_momentum(config: InnerConfig) -> InnerConfig:
    """The settings of the optimizer inside: Schedule-Free's average takes the place of momentum."""
    if config.averaging != "schedule_free":
        return config
    return replace(config, momentum=0.0, betas=(0.0, config.betas[1]))


def _stepper(config: InnerConfig, model: nn.Module) -> InnerOptimizer:
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = _groups(trainable, config.weight_decay)
    if config.optimizer == "sgd":
        # Nesterov's look-ahead along a momentum of zero is no look-ahead, and torch.optim refuses it.
        nesterov = config.nesterov and config.momentum > 0
        return uncompiled(SGD)(groups, lr=config.lr, momentum=config.momentum, nesterov=nesterov, fused=True)
    if config.optimizer == "adamw":
        return _adamw(config, trainable)
    if config.optimizer == "accum_adamw":
        return uncompiled(AccumAdamW)(groups, config.lr, config.betas, config.eps, moments_every=config.moments_every)
    if config.optimizer == "acco_adamw":
        return uncompiled(AccoAdamW)(groups, config.lr, config.betas, config.eps)
    if config.optimizer == "qh_adopt":
        return uncompiled(QHAdopt)(groups, config.lr, config.betas, config.eps, slow_weight=config.slow_weight)
    hidden = _hidden_matrices(model)
    if not hidden:
        raise ConfigError(
            f"inner.optimizer is '{config.optimizer}', but {type(model).__name__} has 0 hidden matrices (trainable 2-D "
            "weights that are neither embedding nor output head); use 'adamw'"
        )
    chosen = set(map(id, hidden))
    shared = {"weight_decay": config.weight_decay, "momentum": config.momentum, "nesterov": config.nesterov}
    if config.optimizer == "muon":
        muon = uncompiled(Muon)(hidden, lr=config.lr, adjust_lr_fn="match_rms_adamw", **shared)
    else:
        muon = uncompiled(SpectralMuon)(hidden, lr=config.lr, **shared)
    rest = [p for p in trainable if id(p) not in chosen]
    return Joined(muon=muon, adamw=_adamw(config, rest)) if rest else muon


def _adamw(config: InnerConfig, parameters: list[nn.Parameter]) -> AdamW:
    groups = _groups(parameters, config.weight_decay)
    return uncompiled(AdamW)(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def _groups(parameters: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups: matrices with weight decay, norms and biases without."""
    matrices = [p for p in parameters if p.ndim >= 2]
    vectors = [p for p in parameters if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The trainable 2-D weights between the embeddings and the output head, in the order of the model.

    A model of `transformers` names its head itself; in any other model it is the last linear layer. The router of experts, a
    matrix [E, D] behind a softmax, is one of them.
    """
    outer = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    named = getattr(model, "get_output_embeddings", None)
    head = linear[-1:] if named is None else [named()]
    outer += [module for module in head if module is not None]  # another stage may have it
    ends = {id(p) for module in outer for p in module.parameters()}
    return [p for p in model.parameters() if p.requires_grad and p.ndim == 2 and id(p) not in ends]


def warmup_steps(config: InnerConfig, total_steps: int) -> int:
    """The inner steps of the warm-up in a run of so many.

    >>> warmup_steps(InnerConfig(), 300), warmup_steps(InnerConfig(warmup_steps=90), 300)
    (30, 90)
    """
    return round(_WARMUP * total_steps) if config.warmup_steps is None else config.warmup_steps


def lr_scale(config: InnerConfig, progress: float, total_steps: int) -> float:
    """The learning rate at a (fractional) inner step over its peak: warm-up times the shape of the schedule.

    With `w = warmup_steps`, `T = total_steps`, `m = min_lr_ratio`, `d = decay_fraction` at step p:
    warm-up `min(1, (p + 1) / w)`; cosine `m + (1 - m)(1 + cos πu) / 2` with `u = (p - w) / (T - w)`; wsd `1 - (1 - m)u`
    with `u = (p - (1 - d)T) / (dT)`; u is kept between 0 and 1.

    Args: `progress` counts the steps taken before this one, 0 for the first.

    >>> config = InnerConfig(schedule="cosine", warmup_steps=10, min_lr_ratio=0.1)
    >>> [round(lr_scale(config, step, 110), 3) for step in (0, 9, 10, 60, 110)]
    [0.1, 1.0, 1.0, 0.55, 0.1]
    """
    w = warmup_steps(config, total_steps)
    rate = LearningRate(config.lr, config.schedule, w, config.min_lr_ratio, config.decay_fraction)
    return rate.scale(progress, total_steps)


def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Shortens the gradients to a global L2 norm of at most `max_norm`; returns the norm they had, a scalar tensor."""
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm)


def share_moments(
    optimizer: InnerOptimizer, model: nn.Module, layout: Layout, buffers: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Moves the two moments of AdamW or QHAdopt into two flat vectors `[P]` in the order of `layout`, of which they become views.

    Call it again after `load_state_dict`, which replaces these views by new tensors.
    Raises: ConfigError for any other optimizer. Cost: none beyond what the optimizer keeps.
    Source: DES-LOC (arXiv 2505.22549) averages them at separate periods.
    """
    if not isinstance(optimizer, AdamW | QHAdopt):
        raise ConfigError(
            f"schedule.inner_every exchanges the moments of AdamW or QHAdopt and the inner optimizer is "
            f"{type(optimizer).__name__}; set inner.optimizer = 'adamw' or 'qh_adopt', or remove schedule.inner_every"
        )
    parameters = dict(model.named_parameters())
    like = next(iter(parameters.values()))
    if buffers is None:
        buffers = like.new_zeros(layout.numel), like.new_zeros(layout.numel)
    for leaf in layout.leaves:
        state = optimizer.state[parameters[leaf.name]]
        state.setdefault("step", torch.zeros((), dtype=torch.float32, device=like.device))
        for name, buffer in zip(("exp_avg", "exp_avg_sq"), buffers, strict=True):
            view = buffer[leaf.start : leaf.stop].view(leaf.shape)
            if name in state:
                view.copy_(state[name])
            state[name] = view
    return buffers


def warn_of_slow_bf16(config: InnerConfig, device: torch.device) -> None:
    """Warns once per process of bf16 products on a processor where fp32 products are faster."""
    if device.type != "cpu":
        return
    if config.autocast == "bf16" and not is_fast_in_bf16():
        times = "two to three" if computes_bf16() else "some fifty"
        _warn("inner.autocast is 'bf16'", times, "remove it")
    if config.optimizer == "muon" and not computes_bf16():
        _warn("inner.optimizer is 'muon', which orthogonalizes in bf16", "some fifty", "take spectral_muon")


@functools.cache  # once for an experiment of many runs
def _warn(what: str, times: str, instead: str) -> None:
    log.warning(
        f"{what}, and products in bf16 take {times} times longer than those in fp32 on this processor, which has neither AMX "
        f"tiles nor the bf16 of ARM; {instead}, or train on one that has, or on a GPU"
    )
