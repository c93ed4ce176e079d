"""Fine-tuning: low-rank adapters on a frozen model, and what a fine-tuned model leaves for other programs."""

from hpczero.finetune.exporting import save_adapter, save_merged
from hpczero.finetune.lowrank import LowRank, Tasks, first_values, lora, merge, trained, use

__all__ = [
    "LowRank",
    "Tasks",
    "first_values",
    "lora",
    "merge",
    "save_adapter",
    "save_merged",
    "trained",
    "use",
]
