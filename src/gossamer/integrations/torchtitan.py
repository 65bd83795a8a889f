"""Gossamer in torchtitan: each unmodified torchtitan job is a site, and two words of its command line join it to the others.

    --override.imports 'gossamer.integrations.torchtitan.outer={"rule": "gasloc", "local_steps": 30, "join": "HOST:PORT"}' \\
        gossamer.integrations.torchtitan.data gossamer.integrations.torchtitan.metrics

GOSSAMER_SITE="0/3" in the environment says which site of how many a job is, so that all have one command line. GOSSAMER_OUTER
names method, local steps and address in place of the options (`gossamer.integrations.environment`).
"""

import atexit
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchtitan.components.dataloader import BaseDataLoader  # pyright: ignore
from torchtitan.components.metrics import MetricsProcessor  # pyright: ignore
from torchtitan.components.optimizer import OptimizersContainer  # pyright: ignore
from torchtitan.config.override import derive, override  # pyright: ignore
from torchtitan.tools.logging import logger  # pyright: ignore

from gossamer.errors import ConfigError
from gossamer.integrations.environment import OUTER, SITE, rule_and_options, site_of
from gossamer.library import Outer, OuterOptions


class _Optimizers(OptimizersContainer):
    """torchtitan's optimizers, and after each of their steps one of the outer loop."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        rule: str = ""
        """None: that of GOSSAMER_OUTER, or diloco."""
        join: str = ""
        local_steps: int = 30
        codec: str | None = None
        topology: str | None = None
        seed: int = 0
        timeout_s: float = 300.0
        elastic: bool = False
        peers: str | None = None

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        super().__init__(config, model_parts=model_parts)
        self._asked, self._outer = config, None
        self._seconds, self._bytes = 0.0, 0

    @property
    def outer(self) -> Outer[nn.Module]:
        """Made late, before the first inner step: torchtitan loads the weights to begin with after the optimizers are made."""
        if self._outer is None:
            one, parts = self._asked, self.model_parts
            model: nn.Module = parts[0] if len(parts) == 1 else nn.ModuleList(parts)
            asked = OUTER in os.environ
            names = ("codec", "topology", "seed", "timeout_s", "elastic", "peers", *(() if asked else ("local_steps",)))
            options: OuterOptions = {name: value for name in names if (value := getattr(one, name))}  # pyright: ignore[reportAssignmentType]
            if one.join or not asked:
                options |= OuterOptions(site=site_of(os.environ.get(SITE)), join=one.join)
            rule, options = rule_and_options(one.rule or (None if asked else "diloco"), options)
            self._outer = Outer[nn.Module](model, rule, **options)
            atexit.register(self._outer.close)  # torchtitan ends without notice to its optimizers
            _MADE.append(self._outer)
        return self._outer

    def step(self, closure: None = None) -> None:
        """One step of all optimizers, which the outer loop counts."""
        outer = self.outer
        super().step(closure)
        began = time.perf_counter()
        ended = outer.step()
        self._seconds += time.perf_counter() - began
        if ended:
            metrics = outer.metrics()
            self._bytes += metrics.bytes_sent
            logger.info(
                "gossamer: site %d of %d, round %d, %d bytes sent, %.3f s in exchanges",
                outer.worker,
                outer.n,
                outer.rounds,
                metrics.bytes_sent,
                self._seconds,
            )

    def site_metrics(self, loss: float) -> dict[str, float]:
        """Figures for torchtitan's metrics: of this process, and the mean of the sites' latest losses."""
        losses = self.outer.losses(loss)
        return {
            "outer/rounds": float(self.outer.rounds),
            "outer/bytes_sent": float(self._bytes),
            "outer/exchange(s)": self._seconds,
            "outer/sites": float(len(losses)),
            "outer/loss_over_sites": statistics.fmean(losses.values()),
        }

    def state_dict(self) -> dict[str, Any]:
        """The states of the optimizers and of the outer loop, under flat names."""
        return {**super().state_dict(), **self.outer.shared_state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads both."""
        ours = {name: value for name, value in state_dict.items() if name.startswith("outer.")}
        super().load_state_dict({name: value for name, value in state_dict.items() if name not in ours})
        self.outer.load_shared_state_dict(ours)


_MADE = list[Outer[nn.Module]]()
"""The outer loop of this process, for the loader and the metrics, which torchtitan makes by themselves."""


class _SiteLoader(BaseDataLoader):
    """Any loader of torchtitan, with the sites as further data-parallel ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        inner: Any = None
        same: bool = False
        rounds: int = 0

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **options: Any) -> None:
        (site, sites), (n, rank) = site_of(os.environ.get(SITE)), (1, 0) if config.same else (dp_world_size, dp_rank)
        self._inner = config.inner.build(dp_world_size=n * sites, dp_rank=n * site + rank, **options)
        self._rounds = config.rounds

    def __iter__(self) -> Iterator[Any]:
        for batch in self._inner:
            if self._rounds and _MADE and _MADE[0].rounds >= self._rounds:
                return  # on all processes of the site, which are after the same round
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The position of the loader."""
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the position."""
        self._inner.load_state_dict(state_dict)


class _Metrics(MetricsProcessor):
    """torchtitan's metrics, with those of the outer loop among them."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Logs the metrics of torchtitan, and `outer/...`."""
        if not isinstance(self.optimizers, _Optimizers):
            raise ConfigError(
                "gossamer.integrations.torchtitan.metrics is among --override.imports and the optimizers are "
                f"{type(self.optimizers).__name__}, so that there are no rounds to tell of; name "
                "gossamer.integrations.torchtitan.outer too"
            )
        metrics = self.optimizers.site_metrics(global_avg_loss)
        logger.info(
            "gossamer: loss %.5f over %d sites after round %d",
            metrics["outer/loss_over_sites"],
            metrics["outer/sites"],
            metrics["outer/rounds"],
        )
        super().log(step, global_avg_loss, global_max_loss, grad_norm, {**(extra_metrics or {}), **metrics})


@override(target=OptimizersContainer.Config)
def outer(config: Any, **options: Any) -> Any:
    """The optimizers of a job that is one of several sites.

    Args: `options` are rule, local_steps, codec, topology, seed, timeout_s, elastic and peers as of `gossamer.Outer`, and `join`,
        HOST:PORT of the first process of site 0.
    Raises: when training begins, what Outer raises.
    """
    return derive(config, _Optimizers.Config, **options)


@override(target=BaseDataLoader.Config)
def data(config: Any, same: bool = False, rounds: int = 0) -> Any:
    """The loader of a job that reads its site's part of the data.

    Args:
        same: gives all processes of a site the same batches, for bitwise tests.
        rounds: the round of the run after which there are no more batches, so that a site that has come back, whose own steps are
            fewer, ends with the others; 0 for no end.
    """
    return derive(config, _SiteLoader.Config, inner=config, same=same, rounds=rounds)


@override(target=MetricsProcessor.Config)
def metrics(config: Any) -> Any:
    """The metrics of a job that is one of several sites, with rounds, bytes, seconds in exchanges and the loss over sites."""
    return derive(config, _Metrics.Config)
