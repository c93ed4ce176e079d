"""Accelerators: where tensors live, in which order work is done there, what other processes may see of it."""

from hpczero.accelerator.base import Accelerator, Attached, Lane, Mark, MemoryExport, Span
from hpczero.accelerator.choice import accelerator_of, be_deterministic, choose_accelerator
from hpczero.accelerator.host import HostAccelerator

__all__ = [
    "Accelerator",
    "Attached",
    "HostAccelerator",
    "Lane",
    "Mark",
    "MemoryExport",
    "Span",
    "accelerator_of",
    "be_deterministic",
    "choose_accelerator",
]
