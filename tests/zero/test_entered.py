"""How many files of the package one training step enters: what a reader has to hold to follow it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import hpczero
from hpczero.comm.calls import AGAIN
from hpczero.models.config import GPTConfig
from hpczero.models.gpt import GPT
from tests.helpers.small_models import adamw
from tests.helpers.world import World

# The model's own file is one of them.
AT_MOST = {"forward": 17, "backward": 20, "optimizer.step": 25, "one unit": 10, "whole step": 37}


class Entered:
    """Files of the package whose functions are called, by part of the step."""

    def __init__(self) -> None:
        self.files: dict[str, set[str]] = {}

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Count inside, as ``part``."""
        root, files = f"{hpczero.__path__[0]}/", self.files.setdefault(part, set())

        def see(frame: Any, event: str, argument: object) -> None:
            name = frame.f_code.co_filename
            if event == "call" and name.startswith(root):
                files.add(name.removeprefix(root))

        before = sys.getprofile()
        sys.setprofile(see)
        try:
            yield
        finally:
            sys.setprofile(before)


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_a_step_enters_few_files(world: World):
    model = GPT(GPTConfig(vocab_size=64, context=16, layers=3, hidden=32, heads=2))
    model.initialize_all(seed=0)
    optimizer = adamw(model)
    tokens = torch.randint(64, (2, 16))
    with world.zeroified(model, optimizer, stage=3, transport="flat") as sharding:
        for _ in range(4):  # what the first steps do once
            entered = Entered()
            with entered.during("forward"):
                loss = model(tokens, tokens)
            with entered.during("backward"):
                loss.backward()
            with entered.during("clipping"):
                hpczero.clip_grad_norm_(model, 1.0)
            with entered.during("optimizer.step"):
                optimizer.step()
            with entered.during("zero_grad"):
                optimizer.zero_grad()
        entered.files["whole step"] = set[str]().union(*entered.files.values())
        unit = sharding.units[1]
        for _ in range(2 * AGAIN):  # until ranks no longer compare what follows
            entered.files["one unit"] = set()
            with entered.during("one unit"):
                unit.unshard()
                unit.whole.wait_for_unshard()
                unit.reshard()
    counts = {part: len(entered.files[part]) for part in AT_MOST}
    more = {part: sorted(entered.files[part]) for part in AT_MOST if counts[part] > AT_MOST[part]}
    world.check(not more, f"{counts}, expected at most {AT_MOST}; entered are {more}")
