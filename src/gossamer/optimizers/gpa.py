"""GPA: a running average of the iterates, near which the gradients are taken."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.optimizers.accum_adamw import pieces
from gossamer.optimizers.contract import InnerOptimizer, loss_of
from gossamer.settings.options import Count, Decay, Portion, checked


class GPA(Optimizer):
    """Primal averaging around any optimizer: it steps z with gradients taken at y, between z and the average x to be evaluated.

    y = μ_y x + (1 - μ_y) z;   z ← the base optimizer's step from z, its gradients taken at y;   x ← μ_x x + (1 - μ_x) z

    The model's parameters are y. `eval()` puts x in their place and `train()` y again, both exactly, as with the Schedule-Free
    optimizers. Learning rates, schedules and clipping work as on the base, whose parameter groups these are.

    With `mu_x=None` it is Schedule-Free, for which the base has no momentum, as with `AdamW(betas=(0, β₂))`. Where γ_t is the
    largest learning rate up to step t and λ the base's weight decay, which is then taken at y:
    z ← z - lr λ y, and the base's step without decay;   x ← (1 - c) x + c z,  c = γ_t² / Σ_{i≤t} γ_i²

    Args:
        base: any optimizer whose step needs no closure; its weight decay acts on z.
        mu_x: weight of the old average: 0.9967 averages over some 300 steps. None for Schedule-Free, `x = Σ γ_t² z_t / Σ γ_t²`
            over the points after each step; with a constant learning rate that is their mean.
        mu_y: the point between z (0) and x (1) at which gradients are taken.
        x: tensors for x of each parameter, such as views of a flat buffer; None allocates them.
        z: the same for z.
    Raises: ConfigError for weights out of range; RuntimeError for a step in eval mode.
    Cost: two copies of the parameters (2 P) and five passes over them a step. One copy would suffice, as x follows from y and z,
        but only within rounding and not for μ_y = 0; and workers that mix x and z with peers need both.
    Source: Defazio et al., arXiv 2512.17131; with `mu_x=None` Defazio et al., arXiv 2405.15682, and μ_y is their β₁.
    Differs: their Schedule-Free AdamW keeps neither x nor a first moment, which is the gradient here. For μ_x a number, a base
        with an L2 gradient (torch's SGD with weight decay) takes it at z, not at y.
    Fails when: something else changes the parameters between two steps: they are y, and the next step overwrites them from z
        and x. Change those two instead and call `recompute`. In bf16 an average with μ_x near 1 does not move.

    >>> w = nn.Parameter(torch.tensor([1.0]))
    >>> optimizer = GPA(torch.optim.SGD([w], lr=0.5), mu_x=0.75, mu_y=0.5)
    >>> w.grad = torch.tensor([1.0])
    >>> optimizer.step()                    # z = 1 - 0.5, x = 0.75 + 0.25 z, y is half-way
    >>> w.data
    tensor([0.6875])
    >>> optimizer.eval(); w.data
    tensor([0.8750])
    """

    @checked
    def __init__(
        self,
        base: InnerOptimizer,
        *,
        mu_x: Decay | None = 0.9967,
        mu_y: Portion = 0.7,
        x: Mapping[nn.Parameter, Tensor] | None = None,
        z: Mapping[nn.Parameter, Tensor] | None = None,
    ) -> None:
        super().__init__(base.param_groups, getattr(base, "defaults", {}))
        self.base, self.mu_x, self.mu_y = base, mu_x, mu_y
        self.steps, self.training = 0, True
        self.homes = {"x": x, "z": z}
        self.param_groups = base.param_groups
        for home in self.homes.values():
            for p, place in (home or {}).items():
                place.copy_(p.detach())  # so that they are valid before the first step

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Takes one step along the gradients; returns the loss if a closure computes it."""
        if not self.training:
            raise RuntimeError(
                f"the parameters are the average of {self.steps} steps, as after eval(), and not where gradients are to be "
                "taken; call train() before the forward pass"
            )
        loss = loss_of(closure)
        groups = [(group, [(p, *self._average(p)) for p in group["params"]]) for group in self.param_groups]
        for group, parts in groups:
            decay = group["lr"] * group.get("weight_decay", 0.0) if self.mu_x is None else 0.0
            for p, _, z in parts:
                p.copy_(z - decay * p if decay else z)
        self._step_of_base()
        self.steps += 1
        for group, parts in groups:
            c = self._share_of_step(group)
            for part in parts:
                for p, x, z in pieces(*part):
                    z.copy_(p)
                    x.copy_(toward(x, z, c))
                    p.copy_(toward(z, x, self.mu_y))
        return loss

    def _step_of_base(self) -> None:
        """The base's step; in Schedule-Free without weight decay, which was taken at y."""
        decays = [group.get("weight_decay") for group in self.param_groups]
        try:
            for group in self.param_groups if self.mu_x is None else []:
                group["weight_decay"] = 0.0
            self.base.step()
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                if decay is not None:
                    group["weight_decay"] = decay

    def _share_of_step(self, group: dict[str, Any]) -> float:
        """The weight of this step's z in the new average; in Schedule-Free the group keeps the running sums for it."""
        if self.mu_x is not None:
            return 1 - self.mu_x
        largest = group["largest_lr"] = max(group["lr"], group.get("largest_lr", 0.0))
        total = group["sum_of_weights"] = group.get("sum_of_weights", 0.0) + largest**2
        return largest**2 / total if total else 0.0

    def _average(self, p: nn.Parameter) -> tuple[Tensor, Tensor]:
        """x and z of a parameter; both start at the parameter."""
        averages = self.state[p]
        if not averages:
            for name, home in self.homes.items():
                averages[name] = (torch.empty_like(p) if home is None else home[p]).copy_(p)
        return averages["x"], averages["z"]

    def eval(self) -> None:
        """Sets the parameters to the average x, for evaluation and publication."""
        self.training = False
        self.recompute()

    def train(self) -> None:
        """Sets the parameters to y, for training."""
        self.training = True
        self.recompute()

    @torch.no_grad()
    def recompute(self) -> None:
        """Recomputes the parameters from x and z, after these were changed from outside."""
        for p, averages in self.state.items():
            p.copy_(toward(averages["z"], averages["x"], self.mu_y) if self.training else averages["x"])

    def state_dict(self) -> dict[str, Any]:
        """Everything that `load_state_dict` needs to continue bit for bit; x and z themselves, not copies."""
        return {
            **super().state_dict(),
            "base": self.base.state_dict(),
            "steps": self.steps,
            "training": self.training,
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a state, and the parameters that follow from it. Raises ValueError when it does not fit."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        for k, saved in state_dict["state"].items():
            for name in self.homes:
                if k >= len(parameters) or saved[name].shape != parameters[k].shape:
                    raise ValueError(
                        f"{name} of parameter {k} has the shape {tuple(saved[name].shape)} and the parameters have "
                        f"{[tuple(p.shape) for p in parameters]}"
                    )
        self.base.load_state_dict(state_dict["base"])
        self.param_groups = self.base.param_groups
        self.steps, self.training = state_dict["steps"], state_dict["training"]
        self.state.clear()
        for k, saved in state_dict["state"].items():
            for target, value in zip(self._average(parameters[k]), (saved["x"], saved["z"]), strict=True):
                target.copy_(value)
        self.recompute()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()  # torch's own drops the base when model and optimizer are copied together


def toward(start: Tensor, end: Tensor, weight: float) -> Tensor:
    """`(1 - weight) start + weight end`, exact at both ends and where the two are equal, which the plain formula is not.

    >>> a, b = torch.tensor(0.1), torch.tensor(0.7)
    >>> [bool(toward(a, b, weight) == end) for weight, end in ((0.0, a), (1.0, b))], bool(toward(b, b, 0.3) == b)
    ([True, True], True)
    """
    if weight <= 0.5:
        return start + weight * (end - start)
    return end + (1 - weight) * (start - end)


@checked
def mu_x_like_diloco(local_steps: Count) -> float:
    """The `mu_x` with which GPA averages as DiLoCo with one worker, H local steps and momentum 0.9 does: `0.9^(1/H)`.

    Source: arXiv 2512.17131, table 4.

    >>> [round(mu_x_like_diloco(h), 4) for h in (1, 8, 32, 128)]
    [0.9, 0.9869, 0.9967, 0.9992]
    """
    return 0.9 ** (1 / local_steps)
