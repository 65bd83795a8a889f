"""Rules on parameters in half precision: the outer update is made on an fp32 master, and half precision is what is sent."""

from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.rules.contract import Context, Rule, around, sends_parameters
from gossamer.topologies.mixing import widen
from gossamer.tree import Tree, map_leaves

HALVES = (torch.bfloat16, torch.float16)


class _State(NamedTuple):
    """The state of the wrapped rule in fp32, and the parameters as it left them (absent where that state has them)."""

    inner: Tree
    master: Tree


def with_master(rule: Rule) -> Rule:
    """Lets a rule work in fp32 on parameters in bf16 or fp16, which would round away outer steps smaller than their spacing.

    m is what the last outer update wrote, x = round(m) is what is trained, and the rule sees m + (x_end - round(m))

    so that neither state nor parameters are rounded from round to round. A message is rounded to the dtype of the parameters,
    except for single numbers. Rules that average whole parameters send their distance from round(m), which all workers share:
    they would lose what is smaller than the spacing in each round otherwise.

    Args:
        rule: one that acts on parameters.
    Cost: the bytes of the rule's messages in half precision; its state in fp32, and 1 P of fp32 where the rule does not keep
        the start of the round.
    Source: fp32 master weights as in mixed-precision training, arXiv 1710.03740, section 3.1; here around the outer step.
    Fails when: the inner optimizer's own steps are below the spacing of the parameters, which rounds them away before any
        outer step. A merge by weights (`schedule.merge = 0.5`) rounds what it merges once a round, as an inner step does.
    """
    kept, reset = rule.start, rule.reset
    from_start = rule.averages and rule.identical and sends_parameters(rule)

    def start(s: _State) -> Tensor:
        return s.master if kept is None else kept(s.inner)

    def rounded(x: Tensor, s: _State) -> Tensor:
        """The parameters from which the local phase began."""
        return widen(start(s).to(x.dtype))

    def whole(x: Tensor, s: _State) -> Tensor:
        return start(s) + (widen(x) - rounded(x, s))

    def init(x: Tensor, ctx: Context) -> _State:
        master = x.float()
        return _State(rule.init(master, ctx), master if kept is None else ())

    def send(x: Tensor, s: _State, ctx: Context) -> Tree:
        message = rule.send(whole(x, s), s.inner, ctx)
        if from_start:
            message = map_leaves(lambda leaf: leaf - rounded(x, s), message)
        return map_leaves(lambda leaf: leaf.to(x.dtype) if leaf.numel() > 1 else leaf, message)

    def recv(x: Tensor, s: _State, own_decoded: Tree, combined: Tree, ctx: Context) -> tuple[Tensor, _State]:
        own_decoded, combined = map_leaves(widen, own_decoded), map_leaves(widen, combined)
        if from_start:
            own_decoded, combined = (
                map_leaves(lambda leaf: leaf + rounded(x, s), tree) for tree in (own_decoded, combined)
            )
        m, inner = rule.recv(whole(x, s), s.inner, own_decoded, combined, ctx)
        return m.to(x.dtype), _State(inner, m if kept is None else ())

    return around(
        rule,
        init=init,
        send=send,
        recv=recv,
        compiles=False,  # the compiler drops a conversion from fp32 to bf16 and back
        state_copies=rule.state_copies + (kept is None),
        reset=None if reset is None else lambda x, s: s._replace(inner=reset(whole(x, s), s.inner)),
        start=start,
    )
