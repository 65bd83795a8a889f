"""What a lossy codec does to a rule that sends whole parameters: refused where it destroys the model, else said in a number.

A pseudo-gradient, or another difference from a point that the receivers know, is as small as what was trained, and so is the
error of its codec. The error of whole parameters is as large as a share of the parameters, in every exchange, also between
workers that agree.
"""

from gossamer.codecs import Codec
from gossamer.codecs.codec import relative_error
from gossamer.rounds.compatibility.combination import Combination
from gossamer.rules.contract import amplification, sends_parameters

LIMIT = 0.05
"""The largest relative error of a codec that may carry whole parameters under a rule that keeps the mean of the workers."""
LIMIT_OF_MEANS = 0.005
"""The same under a rule that takes the decoded parameters in place of its own: training in smaller steps than the codec's is
lost."""
_MEASURED = 0.017
"""The largest error of an exchange with which gossip was trained beside exact messages: int8, γ = 0.7."""
_SPARSE = 0.5  # a codec that keeps less than this share of a message's square norm is sparse


def loses_mass(c: Combination) -> bool:
    """Whether a codec rounds the mass that workers push, and not its weight: the ratio moves without end."""
    pushes = c.kind == "rounds" and c.rule.needs == "push" and not c.topology.doubly_stochastic
    return pushes and c.topology.n > 1 and not c.codec.exact


def destroys(c: Combination) -> bool:
    """Whether the error of the codec on whole parameters is beyond what a model stands."""
    return not loses_mass(c) and _carries_parameters(c) and not _error(c.codec) <= _limit(c)


def too_much(c: Combination) -> str:
    """The error of the codec, and what is allowed."""
    return (
        f"codec '{_worst(c.codec).name}' is off by {_error(c.codec):.2g} of their norm in every exchange, where at most "
        f"{_limit(c):g} can be allowed"
    )


def instead(c: Combination) -> str:
    """What sends differences in the place of a rule on parameters."""
    if c.kind == "pair":
        return "use a [server], to which differences are sent"
    if c.rule.needs == "everyone":
        return "use 'diloco', which sends differences (with lr = 1 and optimizer = 'sgd' it is 'local_sgd')"
    return "use 'anchored_gasloc' on topology 'pga', or 'choco' on a static one, which send differences"


def change(c: Combination) -> float | None:
    """By how much of their norm an exchange may change parameters although the workers agree; None where codecs do no harm.

    ε max(1, α (1 + γ)) for a codec of relative error ε on Gaussian numbers, and gossip with step α and momentum γ.
    """
    if not _carries_parameters(c):
        return None
    return _error(c.codec) * (1.0 if c.kind == "pair" else max(amplification(rule) for _, rule in c.rules))


def borne(c: Combination) -> float:
    """The error of an exchange with which gossip in rounds was trained and lost nothing; 0 for what was not tried.

    Source: `docs/evidence/size-and-rounds.md`, "Local steps and codecs in longer runs", with bf16 and int8.
    """
    return _MEASURED if c.kind == "rounds" and c.rule.mean_preserving else 0.0


def lossy_warning(c: Combination) -> str | None:
    """A sentence for a codec that the run can bear at a price; None for one without."""
    if (share := change(c)) is not None and share > borne(c):
        return (
            f"{c.who} sends whole parameters through codec '{_worst(c.codec).name}': each exchange brings an error of up to "
            f"{share:.2%} of their norm, also between workers that agree, or nearly do; "
            f"{instead(c)}"
        )
    codec, rule = c.codec, c.rule
    if c.kind not in ("rounds", "no waiting") or c.topology.n == 1 or rule.feeds_back or rule.start is None:
        return None
    if codec.exact or codec.contraction is None or codec.contraction >= _SPARSE:
        return None
    return (
        f"codec '{codec.name}' guarantees to keep only {codec.contraction:.1%} of a message (of its square norm), and rule "
        f"'{rule.name}' never sends the remainder; "
        + ("set rule.error_feedback = {}" if rule.averages else "use 'choco', or a dense codec such as 'int8'")
    )


def _carries_parameters(c: Combination) -> bool:
    lossy = not c.codec.exact or (c.codec.back is not None and not c.codec.back.exact)
    if c.kind == "server" or c.topology.n == 1 or not lossy:
        return False
    return c.kind == "pair" or sends_parameters(c.rule)


def _limit(c: Combination) -> float:
    return LIMIT if c.kind == "pair" or c.rule.mean_preserving else LIMIT_OF_MEANS


def _worst(codec: Codec) -> Codec:
    """Of the two legs of a mean, the one with the larger error."""
    return codec if codec.back is None else max(codec, codec.back, key=relative_error)


def _error(codec: Codec) -> float:
    return relative_error(_worst(codec))
