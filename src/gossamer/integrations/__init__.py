"""Gossamer in other trainers: the Hugging Face `Trainer`, Accelerate and Lightning.

These frameworks wrap a model in DistributedDataParallel, or average its gradients, as soon as they count more than one process.
Rounds need workers that train apart. So every worker runs the framework as if it were its only process, with its own part of the
data and its own folder of checkpoints, and a callback connects the workers:

    place = gossamer.integrations.as_worker()      # before anything of the framework is made
    mine = place.shard(dataset)

The recipes are in `gossamer.integrations.transformers`, `gossamer.integrations.accelerate` and `gossamer.integrations.lightning`.
In `gossamer.integrations.torchtitan` it is otherwise: there a worker is a whole job.
None of the frameworks is imported here.
"""

from gossamer.integrations.place import Place as Place
from gossamer.integrations.place import as_worker as as_worker
from gossamer.integrations.place import newest_common_step as newest_common_step

__all__ = ["Place", "as_worker", "newest_common_step"]
