"""hpczero: ZeRO training over MPI for plain torch models.

It has the public names and nothing else. They are loaded on first use, so importing the package starts neither MPI nor
torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpczero.adapters.base import Adapter
    from hpczero.comm import Collectives, Flat, Hierarchical
    from hpczero.errors import HpcZeroError
    from hpczero.job.mesh import Mesh
    from hpczero.job.topology import Topology
    from hpczero.parallel.pipeline.runner import Pipeline
    from hpczero.plan import Plan, Stage
    from hpczero.plan.layout import ShardLayout
    from hpczero.plan.offload import Offload
    from hpczero.plan.precision import LossScale, Precision
    from hpczero.zero.access import (
        accumulate,
        finish_update,
        full_gradients,
        gathered,
        read_later,
        register_forward,
    )
    from hpczero.zero.filling import RangeInitializer, loaded_later
    from hpczero.zero.full_state import full_state_dict
    from hpczero.zero.sharding import Sharding
    from hpczero.zero.zeroify import (
        clip_grad_norm_,
        no_sync,
        release,
        sharding,
        zeroify,
    )

__version__ = "0.1.0"

_HOME = {
    "Adapter": "hpczero.adapters.base",
    "Collectives": "hpczero.comm",
    "Flat": "hpczero.comm",
    "Hierarchical": "hpczero.comm",
    "HpcZeroError": "hpczero.errors",
    "LossScale": "hpczero.plan.precision",
    "Mesh": "hpczero.job.mesh",
    "Offload": "hpczero.plan.offload",
    "Pipeline": "hpczero.parallel.pipeline.runner",
    "Plan": "hpczero.plan",
    "Precision": "hpczero.plan.precision",
    "RangeInitializer": "hpczero.zero.filling",
    "ShardLayout": "hpczero.plan.layout",
    "Sharding": "hpczero.zero.sharding",
    "Stage": "hpczero.plan",
    "Topology": "hpczero.job.topology",
    "accumulate": "hpczero.zero.access",
    "clip_grad_norm_": "hpczero.zero.zeroify",
    "finish_update": "hpczero.zero.access",
    "full_gradients": "hpczero.zero.access",
    "full_state_dict": "hpczero.zero.full_state",
    "gathered": "hpczero.zero.access",
    "loaded_later": "hpczero.zero.filling",
    "no_sync": "hpczero.zero.zeroify",
    "read_later": "hpczero.zero.access",
    "register_forward": "hpczero.zero.access",
    "release": "hpczero.zero.zeroify",
    "sharding": "hpczero.zero.zeroify",
    "zeroify": "hpczero.zero.zeroify",
}

_ROOMS = (
    "activations",
    "checkpoint",
    "finetune",
    "hf",
    "optim",
    "parallel",
    "plan",
)  # hpczero.checkpoint.save, hpczero.plan.rules.by_class

__all__ = [
    "Adapter",
    "Collectives",
    "Flat",
    "Hierarchical",
    "HpcZeroError",
    "LossScale",
    "Mesh",
    "Offload",
    "Pipeline",
    "Plan",
    "Precision",
    "RangeInitializer",
    "ShardLayout",
    "Sharding",
    "Stage",
    "Topology",
    "accumulate",
    "clip_grad_norm_",
    "finish_update",
    "full_gradients",
    "full_state_dict",
    "gathered",
    "loaded_later",
    "no_sync",
    "read_later",
    "register_forward",
    "release",
    "sharding",
    "zeroify",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"hpczero.{name}")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'hpczero' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
