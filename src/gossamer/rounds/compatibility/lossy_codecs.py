"""Lossy codecs with rules that send whole parameters: refused where they destroy the model, else a warning with the
error.

A pseudo-gradient, or another difference from a point known to the receivers, is as small as the training progress, and
so is the error of its codec. The error of whole parameters is as large as a share of the parameters, in every exchange,
also between workers that agree.
"""

from gossamer.codecs import Codec
from gossamer.codecs.codec import relative_error
from gossamer.rounds.compatibility.combination import Combination
from gossamer.rules.contract import amplification, sends_parameters

LIMIT = 0.05
"""The largest relative error of a codec that may carry whole parameters under a rule that keeps the mean of the workers."""
LIMIT_OF_MEANS = 0.005
"""The same under a rule that replaces its parameters by decoded ones: training in steps smaller than the codec's is
lost.
"""
_MEASURED = 0.017
"""The largest error of an exchange for which gossip was compared with exact messages: int8, γ = 0.7."""
_SPARSE = 0.5  # a codec that keeps less than this share of a message's square norm is sparse


def loses_mass(c: Combination) -> bool:
    """Whether a codec rounds the mass that workers push, and not its weight: the ratio moves without end."""
    pushes = c.kind == "rounds" and c.rule.needs == "push" and not c.topology.doubly_stochastic
    return pushes and c.topology.n > 1 and not c.codec.exact


def destroys(c: Combination) -> bool:
    """Whether the error of the codec on whole parameters destroys a model."""
    return not loses_mass(c) and _carries_parameters(c) and not _error(c.codec) <= _limit(c)


def too_much(c: Combination) -> str:
    """The error of the codec, and the limit."""
    return (
        f"codec '{_lossier(c.codec).name}' is off by {_error(c.codec):.2g} of their norm in every exchange, where at most "
        f"{_limit(c):g} can be allowed"
    )


def instead(c: Combination) -> str:
    """The rule to use in place of one on parameters, which sends differences."""
    if c.kind == "pair":
        return "use a [server], to which differences are sent"
    if c.rule.needs == "everyone":
        return "use 'diloco', which sends differences (with lr = 1 and optimizer = 'sgd' it is 'local_sgd')"
    return "use 'anchored_gasloc' on topology 'pga', or 'choco' on a static one, which send differences"


def change(c: Combination) -> float | None:
    """The relative change of parameters by an exchange between workers that agree; None where codecs are harmless.

    ε max(1, α (1 + γ)) for a codec of relative error ε on Gaussian numbers, and gossip with step α and momentum γ.
    """
    if not _carries_parameters(c):
        return None
    return _error(c.codec) * (1.0 if c.kind == "pair" else max(amplification(rule) for _, rule in c.rules))


def measured_error_limit(c: Combination) -> float:
    """The error of an exchange up to which gossip in rounds was measured without loss; 0 if not measured.

    Source: `docs/evidence/size-and-rounds.md`, "Local steps and codecs in longer runs", with bf16 and int8.
    """
    return _MEASURED if c.kind == "rounds" and c.rule.mean_preserving else 0.0


def lossy_warning(c: Combination) -> str | None:
    """A warning for a codec that the run tolerates at a cost; None otherwise."""
    if (share := change(c)) is not None and share > measured_error_limit(c):
        return (
            f"{c.method_label} sends whole parameters through codec '{_lossier(c.codec).name}': each exchange brings an error of "
            f"up to {share:.2%} of their norm, also between workers that agree, or nearly do; "
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
        + (_feeding_back(c) if rule.averages else "use 'choco', or a dense codec such as 'int8'")
    )


def _feeding_back(c: Combination) -> str:
    """How to let a rule send what a codec left out."""
    return "give gossamer.rules.error_feedback(rule)" if c.driver == "library" else "set rule.error_feedback = {}"


def _carries_parameters(c: Combination) -> bool:
    lossy = not c.codec.exact or (c.codec.back is not None and not c.codec.back.exact)
    if c.kind == "server" or c.topology.n == 1 or not lossy:
        return False
    return c.kind == "pair" or sends_parameters(c.rule)


def _limit(c: Combination) -> float:
    return LIMIT if c.kind == "pair" or c.rule.mean_preserving else LIMIT_OF_MEANS


def _lossier(codec: Codec) -> Codec:
    """Of the two legs of a mean, the one with the larger error."""
    return codec if codec.back is None else max(codec, codec.back, key=relative_error)


def _error(codec: Codec) -> float:
    return relative_error(_lossier(codec))
