"""Inner optimizers that `torch.optim` does not have, and the interface a worker needs."""

from gossamer.optimizers.acco_adamw import AccoAdamW
from gossamer.optimizers.accum_adamw import AccumAdamW
from gossamer.optimizers.contract import InnerOptimizer, Joined
from gossamer.optimizers.gpa import GPA, mu_x_like_diloco, toward
from gossamer.optimizers.qh_adopt import QHAdopt
from gossamer.optimizers.spectral_muon import SpectralMuon

__all__ = [
    "GPA",
    "AccoAdamW",
    "AccumAdamW",
    "InnerOptimizer",
    "Joined",
    "QHAdopt",
    "SpectralMuon",
    "mu_x_like_diloco",
    "toward",
]
