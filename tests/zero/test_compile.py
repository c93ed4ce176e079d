"""torch.compile, block by block and of the whole model: the same training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import hpczero
from hpczero import finetune
from hpczero.accelerator import HostAccelerator
from hpczero.adapters.gpt import GPTAdapter
from hpczero.errors import StepError
from hpczero.models import GPTConfig
from hpczero.options.config import ModelOptions, RunConfig
from hpczero.run.starting.building import build
from tests.helpers.cases import EVERYTHING
from tests.helpers.small_models import MLP, adamw, mlp_input, tiny_gpt, tiny_tokens, update
from tests.helpers.world import World

# Dynamo looks at the gradients of what it finds, and imports what torch itself has deprecated.
pytestmark = [
    pytest.mark.mpi,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
]


@dataclass(frozen=True)
class Counts:
    """What the compiler did: ``later`` after the second step, ``breaks`` where it ended a graph inside of a block."""

    graphs: int
    later: int
    breaks: int


def trained(
    world: World,
    compiled: str = "",
    *,
    layers: int = 3,
    before: bool = False,
    adapted: bool = False,
    recomputed: bool = False,
    micro_batches: int = 1,
    evaluated: bool = False,
    **options: Any,
) -> tuple[list[float], Counts]:
    """Losses of four steps, and what the compiler did; without the backend's own arithmetic, so that no bit may differ.

    Args:
        compiled: the "model", the "model in place", the "step", the "blocks" or their "forwards"; nothing where empty.
        before: before the model is sharded.
    """
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    model = tiny_gpt(layers=layers, checkpoint_activations=recomputed)
    if adapted:
        finetune.lora(model, rank=2)
    optimizer = torch.optim.AdamW(finetune.trained(model), lr=1e-2, eps=1e-3)
    called: Any = model
    step: Any = update

    def compile_now() -> None:
        nonlocal called, step
        if compiled == "model":
            called = torch.compile(model, backend="aot_eager")
        if compiled == "model in place":
            model.compile(backend="aot_eager")
        if compiled == "step":
            step = torch.compile(update, backend="aot_eager")
        for block in model.blocks:
            if compiled == "blocks":
                block.compile(backend="aot_eager")
            if compiled == "forwards":
                block.forward = torch.compile(block.forward, backend="aot_eager")

    if before:
        compile_now()
    found, graphs = [], []
    with world.zeroified(model, optimizer, **options):
        if not before:
            compile_now()
        for number in range(4):
            for micro in range(micro_batches):
                tokens = tiny_tokens(world.rank + 10 * number + 100 * micro)
                with hpczero.accumulate(model, micro, micro_batches):
                    loss = called(tokens, tokens)
                    loss.backward()
                found.append(loss.item())
            hpczero.clip_grad_norm_(model, 1.0)
            step(optimizer)
            if evaluated:
                model.eval()
                with torch.no_grad():
                    found.append(model(tokens, tokens).item())
                model.train()
            graphs.append(counters["stats"]["unique_graphs"])
    torch._dynamo.reset()  # what it keeps would stay for the tests that follow
    breaks = sum(counters["graph_break"].values())
    return found, Counts(graphs[-1], graphs[-1] - graphs[1], breaks)


@pytest.mark.worth("torch.compile")
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize(
    ("stage", "what", "option", "before"),
    [
        (0, "model", "window", False),
        (2, "model", "flat", True),
        (3, "model", "window", False),
        (3, "model", "window", True),
        (3, "model", "flat", False),
        (3, "model", "hierarchical", True),
        (3, "model in place", "window", True),
        (3, "model in place", "flat", False),
        (3, "model", "fp16", False),
        pytest.param(3, "model", "bf16", False, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_model_trains_the_same(world: World, stage, what, option, before):
    options: dict[str, Any] = {"stage": stage, "layers": 2}
    options["precision" if option in ("fp16", "bf16") else "transport"] = option
    eager, _ = trained(world, **options)
    compiled, _ = trained(world, what, before=before, **options)
    world.check(eager == compiled, f"{eager} {compiled}")


@pytest.mark.worth("torch.compile")
@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 2, 3] if EVERYTHING else [3])
def test_a_compiled_update_trains_the_same(world: World, stage):
    options: dict[str, Any] = {"stage": stage, "layers": 2}
    eager, compiled = (trained(world, what, **options)[0] for what in ("", "step"))
    close = all(abs(a - b) < 1e-5 * abs(a) for a, b in zip(eager, compiled, strict=True))
    world.check(close, f"{eager} {compiled}")


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("transport", ["window", "flat"])
def test_a_zeroified_model_is_not_traced(world: World, stage, transport):
    model = MLP()
    with (
        world.zeroified(model, None, stage=stage, transport=transport),
        pytest.raises(StepError, match=r"was called by torch\.jit\.trace"),
    ):
        torch.jit.trace(model, (mlp_input(0),))


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_compiled_while_gradients_are_there_trains_as_in_plain_torch(world: World, stage):
    """A loop that zeroes gradients when it begins, and evaluates between: under no_grad all is compiled anew."""

    def train(model: torch.nn.Module, optimizer: Any, ranks: range, share: float) -> list[float]:
        called, found = torch.compile(model, backend="eager"), []
        for _ in range(2):
            optimizer.zero_grad()
            for rank in ranks:
                (called(mlp_input(rank)).square().mean() * share).backward()
            optimizer.step()
            with torch.no_grad():
                found.append(float(called(mlp_input(9)).sum()))
        torch._dynamo.reset()
        return found

    plain, model = MLP(), MLP()
    expected = train(plain, adamw(plain), range(world.size), 1 / world.size)
    optimizer = adamw(model)
    with world.zeroified(model, optimizer, stage=stage):
        found = train(model, optimizer, world.own, 1.0)
    world.check(found == pytest.approx(expected, rel=1e-5), f"{found}, {expected}")


@pytest.mark.worth("torch.compile")
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("blocks", {"stage": 0}),
        ("forwards", {"stage": 1, "transport": "flat"}),
        ("blocks", {"stage": 2, "before": True, "evaluated": True}),
        ("blocks", {"stage": 3, "transport": "flat", "micro_batches": 2}),
        ("blocks", {"stage": 3, "transport": "window", "before": True, "evaluated": True}),
        ("forwards", {"stage": 3, "transport": "hierarchical", "before": True}),
        ("forwards", {"stage": 3, "precision": "bf16", "recomputed": True}),
        ("blocks", {"stage": 3, "recomputed": True}),
        ("blocks", {"stage": 3, "adapted": True, "precision": "bf16"}),
        ("forwards", {"stage": 0, "adapted": True, "recomputed": True}),
    ],
)
def test_all_blocks_are_one_graph_that_is_compiled_once(world: World, what, options):
    eager, _ = trained(world, **options)
    compiled, counts = trained(world, what, **options)
    world.check(eager == compiled, f"{eager} {compiled}")
    # One more without gradients, and for the first of adapted blocks, whose input needs none.
    graphs = 1 + options.get("evaluated", False) + options.get("adapted", False)
    expected = Counts(graphs, later=0, breaks=0)
    world.check(counts == expected, f"{counts}")


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("compiled", [True, False])
def test_the_training_command_compiles_every_block(world: World, monkeypatch, compiled):
    found: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda module: found.append(module))
    config = RunConfig(model=ModelOptions(compile=compiled))
    adapter = GPTAdapter(GPTConfig(vocab_size=101, context=16, layers=2, hidden=24, heads=2))
    model, _ = build(config, adapter, world.topology, HostAccelerator())
    hpczero.release(model)
    assert found == (list(model.get_submodule("blocks").children()) if compiled else [])
