"""torchtitan's own `train.py`, unmodified, on a CPU with gloo: what it asks of an accelerator is answered here.

torchtitan takes "cuda" where torch names no accelerator, so torch is made to say "cpu", and `torch.cpu` gets the functions that
torchtitan's metrics call. FlexAttention has no backward on a CPU, so the override `sdpa` puts torchtitan's own
ScaledDotProductAttention in its place. gloo cannot scale while it sums, so FSDP2 sums and then divides, by its own public switch.
"""

import runpy
import types

import torch
import torch._utils
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.get_device_name = lambda device=None: "CPU"
torch.cpu.get_device_properties = lambda device=None: types.SimpleNamespace(total_memory=1 << 34)
torch.cpu.memory_stats, torch.cpu.current_device = lambda device=None: {}, lambda: 0
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda: None
if not hasattr(dist, "set_timeout"):  # torch 2.13
    dist.set_timeout = dist.distributed_c10d._set_pg_timeout
_divide = FSDPModule.set_gradient_divide_factor


def _divide_after_the_sum(self, factor):
    _divide(self, factor)
    self.set_force_sum_reduction_for_comms(True)


FSDPModule.set_gradient_divide_factor = _divide_after_the_sum

if __name__ == "__main__":
    runpy.run_module("torchtitan.train", run_name="__main__")
else:  # imported by torchtitan for the override
    from torchtitan.config.override import derive, override
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

    @override(target=FlexAttention.Config)
    def sdpa(config):
        """Attention that has a backward on a CPU."""
        return derive(config, ScaledDotProductAttention.Config)
