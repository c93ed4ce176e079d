"""Plan: which modules form a unit, what each rank will hold and send. Nothing here needs torch except ``rules``."""

import importlib
from typing import Any

from hpczero.plan.layout import UnitSpec
from hpczero.plan.memory import MemoryPlan, TrafficPlan
from hpczero.plan.plan import Plan, Stage

__all__ = ["MemoryPlan", "Plan", "Stage", "TrafficPlan", "UnitSpec"]


def __getattr__(name: str) -> Any:
    if name == "rules":  # imports torch, so only where it is asked for
        return importlib.import_module("hpczero.plan.rules")
    raise AttributeError(f"module 'hpczero.plan' has no attribute {name!r}")
