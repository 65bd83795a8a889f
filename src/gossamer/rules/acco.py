"""ACCO: data parallelism whose gradients travel while the next ones are computed."""

from gossamer.rules.contract import Rule
from gossamer.rules.data_parallel import data_parallel
from gossamer.settings.options import factory


@factory
def acco() -> Rule:
    """Every inner step applies the mean gradient of the previous step, whose transfer overlaps the next computation.

    g_t ← (1/n) Σ_j g_{t-1},j,   and zeros at first

    With `inner.optimizer = "acco_adamw"` it is ACCO: two such gradients are the halves of a batch, the first of which makes an
    estimate of the next parameters, and both together the step. With any other it is data parallelism with a delay of one.

    Cost: 2(n-1)/n gradients per worker and inner step, behind the computation of a gradient; nothing kept.
    Source: ACCO, Nabli et al., arXiv 2406.02613, and the authors' code.
    Differs: gradients are averaged over workers, of which each computes as many, where theirs count and weigh by how many each
        had; the optimizer is not sharded between workers (ZeRO-1): each makes the whole step.
    Fails when: a transfer takes longer than the computation of a gradient: then every step waits for the rest of it.

    >>> acco().delay_rounds, acco().site
    (1, 'gradients')
    """
    return data_parallel()._replace(delay_rounds=1, single_worker_limit="outer optimizer")
