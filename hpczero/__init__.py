"""hpczero: ZeRO training over MPI for plain torch models.

It has the public names and nothing else. They are loaded on first use, so importing the package starts neither MPI nor
torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpczero.lazy import lazy

if TYPE_CHECKING:
    from hpczero.adapters.base import Adapter as Adapter
    from hpczero.comm import Collectives as Collectives
    from hpczero.comm import Flat as Flat
    from hpczero.comm import Hierarchical as Hierarchical
    from hpczero.errors import HpcZeroError as HpcZeroError
    from hpczero.job.mesh import Mesh as Mesh
    from hpczero.job.topology import Topology as Topology
    from hpczero.parallel.pipeline.runner import Pipeline as Pipeline
    from hpczero.plan import Plan as Plan
    from hpczero.plan import Stage as Stage
    from hpczero.plan.layout import ShardLayout as ShardLayout
    from hpczero.plan.offload import Offload as Offload
    from hpczero.plan.precision import LossScale as LossScale
    from hpczero.plan.precision import Precision as Precision
    from hpczero.zero.access import accumulate as accumulate
    from hpczero.zero.access import finish_update as finish_update
    from hpczero.zero.access import full_gradients as full_gradients
    from hpczero.zero.access import gathered as gathered
    from hpczero.zero.access import read_later as read_later
    from hpczero.zero.access import register_forward as register_forward
    from hpczero.zero.filling import RangeInitializer as RangeInitializer
    from hpczero.zero.filling import loaded_later as loaded_later
    from hpczero.zero.full_state import full_state_dict as full_state_dict
    from hpczero.zero.leaves import Leaves as Leaves
    from hpczero.zero.sharding import Sharding as Sharding
    from hpczero.zero.zeroify import clip_grad_norm_ as clip_grad_norm_
    from hpczero.zero.zeroify import no_sync as no_sync
    from hpczero.zero.zeroify import release as release
    from hpczero.zero.zeroify import sharding as sharding
    from hpczero.zero.zeroify import zeroify as zeroify

__version__ = "0.1.0"

_ROOMS = ("activations", "checkpoint", "finetune", "hf", "optim", "parallel", "plan", "trackers")

__getattr__, __dir__, __all__ = lazy(__name__, __file__, rooms=_ROOMS)
