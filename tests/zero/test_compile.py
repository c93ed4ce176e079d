"""torch.compile, block by block and of the whole model: the same training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch import nn

import hpczero
from hpczero import finetune
from hpczero.accelerator import HostAccelerator
from hpczero.adapters.gpt import GPTAdapter
from hpczero.errors import StepError
from hpczero.models import GPT, GPTConfig
from hpczero.options.config import ModelOptions, RunConfig
from hpczero.run.starting.building import build
from tests.helpers.cases import EVERYTHING
from tests.helpers.small_models import MLP, adamw, mlp_input, tiny_gpt, tiny_tokens, update
from tests.helpers.world import World

SIZES = GPTConfig(vocab_size=101, context=16, layers=2, hidden=24, heads=2)


def losses(
    world: World,
    stage: int,
    *,
    compiled: Literal["", "model", "model in place", "step"],
    transport: str = "auto",
    before: bool = False,
    precision: str = "fp32",
) -> list[float]:
    options: dict[str, Any] = {"stage": stage, "topology": world.topology}
    options |= {"transport": transport, "precision": precision}
    model = GPT(SIZES)
    model.initialize_all(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    if not before:
        hpczero.zeroify(model, optimizer, **options)
    called = torch.compile(model, backend="aot_eager") if compiled == "model" else model
    if compiled == "model in place":
        model.compile(backend="aot_eager")
    if before:
        hpczero.zeroify(model, optimizer, **options)

    step: Callable[..., None] = update
    if compiled == "step":
        step = torch.compile(update, backend="aot_eager")
    generator = torch.Generator().manual_seed(world.rank)
    found = []
    for _ in range(3):
        tokens = torch.randint(101, (2, 17), generator=generator)
        loss = called(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        step(optimizer)
        found.append(loss.item())
    hpczero.release(model)
    torch._dynamo.reset()  # what it keeps would stay for the tests that follow
    return found


# Dynamo looks at the gradients of what it finds, and imports what torch itself has deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
]


@pytest.mark.worth("torch.compile")
@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize(
    ("stage", "what", "transport", "before"),
    [
        (0, "model", "window", False),
        (2, "model", "flat", True),
        (3, "model", "window", False),
        (3, "model", "window", True),
        (3, "model", "flat", False),
        (3, "model", "hierarchical", True),
        (3, "model in place", "window", True),
        (3, "model in place", "flat", False),
    ],
)
def test_a_compiled_model_trains_the_same(world: World, stage, what, transport, before):
    eager = losses(world, stage, compiled="", transport=transport)
    compiled = losses(world, stage, compiled=what, transport=transport, before=before)
    world.check(eager == compiled, f"{eager} {compiled}")


@pytest.mark.mpi
@pytest.mark.ranks(2)
@pytest.mark.parametrize("precision", ["bf16", "fp16"] if EVERYTHING else ["fp16"])
def test_a_compiled_model_trains_the_same_in_half_precision(world: World, precision):
    eager = losses(world, 3, compiled="", precision=precision)
    compiled = losses(world, 3, compiled="model", precision=precision)
    world.check(eager == compiled, f"{eager} {compiled}")


@pytest.mark.worth("torch.compile")
@pytest.mark.mpi
@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 2, 3] if EVERYTHING else [3])
def test_a_compiled_update_trains_the_same(world: World, stage):
    eager, compiled = (losses(world, stage, compiled=choice) for choice in ("", "step"))
    close = all(abs(a - b) < 1e-5 * abs(a) for a, b in zip(eager, compiled, strict=True))
    world.check(close, f"{eager} {compiled}")


@pytest.mark.mpi
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("transport", ["window", "flat"])
def test_a_zeroified_model_is_not_traced(world: World, stage, transport):
    model = GPT(SIZES)
    model.initialize_all(seed=0)
    hpczero.zeroify(model, None, stage=stage, topology=world.topology, transport=transport)
    with pytest.raises(StepError, match=r"was called by torch\.jit\.trace"):
        torch.jit.trace(model, (torch.zeros(2, 5, dtype=torch.long),))
    hpczero.release(model)


@pytest.mark.mpi
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


# --- blocks, all of them one graph


@dataclass(frozen=True)
class Counts:
    """What the compiler did: ``later`` after the second step, ``breaks`` where it ended a graph inside of a block."""

    graphs: int
    later: int
    breaks: int


WAYS: dict[str, Callable[[nn.Module], None]] = {
    "compile": lambda block: block.compile(backend="aot_eager"),
    "forward": lambda block: setattr(
        block, "forward", torch.compile(block.forward, backend="aot_eager")
    ),
}


def train_blocks(
    world: World,
    way: Callable[[nn.Module], None] = lambda block: None,
    *,
    before: bool = False,
    adapted: bool = False,
    recomputed: bool = False,
    micro_batches: int = 1,
    evaluated: bool = False,
    **options: Any,
) -> tuple[list[float], Counts]:
    """Losses of four steps, and what the compiler did, with every block compiled in a ``way``.

    Without the backend's own arithmetic, so that not a bit may differ.
    """
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    model = tiny_gpt(layers=3, checkpoint_activations=recomputed)
    if adapted:
        finetune.lora(model, rank=2)
    optimizer = torch.optim.AdamW(finetune.trained(model), lr=1e-2, eps=1e-3)
    for block in model.blocks if before else ():
        way(block)
    found, graphs = [], []
    with world.zeroified(model, optimizer, **options):
        for block in () if before else model.blocks:
            way(block)
        for step in range(4):
            for micro in range(micro_batches):
                tokens = tiny_tokens(world.rank + 10 * step + 100 * micro)
                with hpczero.accumulate(model, micro, micro_batches):
                    loss = model(tokens, tokens)
                    loss.backward()
                found.append(loss.item())
            hpczero.clip_grad_norm_(model, 1.0)
            update(optimizer)
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
@pytest.mark.mpi
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("compile", {"stage": 0}),
        ("forward", {"stage": 1, "transport": "flat"}),
        ("compile", {"stage": 2, "before": True, "evaluated": True}),
        ("compile", {"stage": 3, "transport": "flat", "micro_batches": 2}),
        ("compile", {"stage": 3, "transport": "window", "before": True, "evaluated": True}),
        ("forward", {"stage": 3, "transport": "hierarchical", "before": True}),
        ("forward", {"stage": 3, "precision": "bf16", "recomputed": True}),
        ("compile", {"stage": 3, "recomputed": True}),
        ("compile", {"stage": 3, "adapted": True, "precision": "bf16"}),
        ("forward", {"stage": 0, "adapted": True, "recomputed": True}),
    ],
)
def test_all_blocks_are_one_graph_that_is_compiled_once(world: World, way, options):
    eager, _ = train_blocks(world, **options)
    compiled, counts = train_blocks(world, WAYS[way], **options)
    world.check(eager == compiled, f"{eager} {compiled}")
    # One more without gradients, and for the first of adapted blocks, whose input needs none.
    graphs = 1 + options.get("evaluated", False) + options.get("adapted", False)
    expected = Counts(graphs, later=0, breaks=0)
    world.check(counts == expected, f"{counts}")


@pytest.mark.mpi
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("compiled", [True, False])
def test_the_training_command_compiles_every_block(world: World, monkeypatch, compiled):
    found: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda module: found.append(module))
    config = RunConfig(model=ModelOptions(compile=compiled))
    model, _ = build(config, GPTAdapter(SIZES), world.topology, HostAccelerator())
    hpczero.release(model)
    assert found == (list(model.get_submodule("blocks").children()) if compiled else [])
