"""Plan: which modules form a unit, what each rank will hold and move. Nothing here needs torch except ``rules``."""

from hpczero.plan.plan import MemoryPlan, Plan, Stage, UnitSpec
from hpczero.plan.traffic import TrafficPlan

__all__ = ["MemoryPlan", "Plan", "Stage", "TrafficPlan", "UnitSpec"]
