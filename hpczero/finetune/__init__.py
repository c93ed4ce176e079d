"""Fine-tuning: low-rank adapters on a frozen model, and what a fine-tuned model leaves for other programs."""

from hpczero.finetune.exporting import save_adapter, save_merged
from hpczero.finetune.lowrank import LowRank, first_values, lora, merge, trained

__all__ = ["LowRank", "first_values", "lora", "merge", "save_adapter", "save_merged", "trained"]
