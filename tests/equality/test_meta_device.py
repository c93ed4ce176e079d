"""A model built without memory and filled shard by shard trains as one that was built whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hpczero.models import GPT, GPTConfig
from tests.equality.cases import gpt_case
from tests.equality.reference import check_same_bits, train_sharded

pytestmark = pytest.mark.mpi

CONFIG = GPTConfig(vocab_size=61, context=10, layers=2, hidden=18, heads=3)


def whole() -> GPT:
    model = GPT(CONFIG)
    model.initialize_all(seed=3)
    return model


def on_meta() -> GPT:
    with torch.device("meta"):
        return GPT(CONFIG)


def initialize(name: str, tensor: Tensor) -> None:
    on_meta().initialize(name, tensor, seed=3)


def test_gpt_from_the_meta_device_trains_to_the_same_bits_as_one_built_whole(topology):
    case = gpt_case(whole, steps=3)
    runs = {"built whole, stage 0": train_sharded(case, topology, stage=0)}
    case = replace(case, build=on_meta, initialize=initialize)
    for stage in case.stages:
        runs[f"meta, stage {stage}"] = train_sharded(case, topology, stage=stage)
    check_same_bits(topology, runs)
