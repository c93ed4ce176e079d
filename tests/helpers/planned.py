"""The run that tests plan with: two ranks of one node, at stage 3 in fp32, with nothing elsewhere."""

from __future__ import annotations

from typing import Any

from hpczero.job.mesh import Mesh
from hpczero.models.config import GPTConfig
from hpczero.plan.peak import PlannedRun


def planned(model: GPTConfig, **changes: Any) -> PlannedRun:
    """That run of ``model``; ``changes`` are its fields."""
    given = {"mesh": Mesh(shard=2), "ranks_per_node": 2, "transport": "window", "stage": 3}
    given |= {"precision": "fp32", "micro_batch": 4, "accumulation": 1, "checkpointing": False}
    return PlannedRun(model, **{**given, **changes})
