"""Import: every rank gets its part of weights that another program wrote; those of another model change nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad

import hpczero
from hpczero import Offload
from hpczero.checkpoint import held, import_weights
from hpczero.checkpoint.foreign import weight_files
from hpczero.checkpoint.foreign.converting import convert
from hpczero.errors import CheckpointMismatch, ConfigError, StepError, TierError
from tests.checkpoint.foreign import once, other_state, theirs, write
from tests.checkpoint.programs import Program, program_of
from tests.checkpoint.test_offloaded import SIZES, WINDOW, failing, on_disk
from tests.helpers.small_models import (
    MLP,
    adamw,
    mlp_backward,
    mlp_steps,
    tiny_gpt,
    tiny_tokens,
    zeroified,
)
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]


@pytest.fixture
def cramped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pieces, and hardly a window stays open."""
    monkeypatch.setattr(weight_files, "CHUNK_NUMEL", 700)
    monkeypatch.setattr(held, "OPEN_NBYTES", WINDOW // 2)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["torch", "safetensors", "sharded"])
def test_weights_come_in_and_the_optimizer_stays(world: World, kind: str, stage: int) -> None:
    state = other_state()
    world.on_root(write, world.folder, state, kind)
    (path,) = world.folder.iterdir()
    with program_of(world.comm, world.size, stage=stage) as program:
        program.train(2)
        moments = [s["exp_avg"].clone() for s in program.optimizer.state.values()]
        import_weights(path, program.model)
        found = hpczero.full_state_dict(program.model)
        kept = [s["exp_avg"] for s in program.optimizer.state.values()]
        world.check(all(map(torch.equal, moments, kept)))
        world.check(int(program.model.get_buffer("calls")) == 41)
        program.train(1)  # goes on
    world.check_state(found, state)


@pytest.mark.ranks(1, 2, 3)
def test_weights_that_are_no_numbers_are_told_once(
    world: World, program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    state = once(other_state())
    state["head.weight"] = torch.full_like(state["head.weight"], torch.nan)
    world.on_root(save_file, state, world.folder / "model.safetensors")
    import_weights(world.folder, program.model)
    told = [line for line in caplog.messages if "NaN values" in line]
    every = [line for lines in world.comm.allgather(told) for line in lines]
    world.check(len(every) == 1 and "head.weight" in every[0], every)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_floating_dtype_becomes_fp32(world: World, dtype: torch.dtype) -> None:
    state = other_state()
    cast = {n: v.to(dtype) if v.dtype is torch.float32 else v for n, v in once(state).items()}
    world.on_root(save_file, cast, world.folder / "model.safetensors")
    expected = {name: cast.get(name, cast["embed.weight"]).to(v.dtype) for name, v in state.items()}
    for name in ("frozen.weight", "frozen.bias"):  # no optimizer, so no master
        expected[name] = expected[name].bfloat16().float()
    with program_of(world.comm, world.size, precision="bf16") as program:
        import_weights(world.folder, program.model)
        found = hpczero.full_state_dict(program.model)
    world.check_state(found, expected)


def without(state: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if name not in names}


# What is in the file instead, the precision of the model, and what is said.
OTHERS: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str, str]] = {
    "names and shapes": (
        lambda s: (
            without(s, "mean", "frozen.bias")
            | {"more": torch.ones(1), "head.weight": torch.ones(13, 7)}
        ),
        "fp32",
        r"they have no frozen.bias, mean; the model has no more; head.weight is \(13, 7\) in the "
        r"file and \(7, 13\) in the model. Build the model",
    ),
    "nothing": (lambda s: {}, "fp32", "they have no"),
    "whole numbers": (
        lambda s: s | {"head.weight": torch.ones(7, 13, dtype=torch.int8)},
        "fp32",
        "head.weight is torch.int8 in the file, expected floating",
    ),
    "untied": (
        lambda s: s | {"back.weight": s["back.weight"] + 1},
        "fp32",
        "embed.weight and back.weight are tied in the model and",
    ),
    "too large": (
        lambda s: s | {"head.weight": torch.full((7, 13), 1e300, dtype=torch.float64)},
        "fp32",
        r"'head.weight' holds 1e\+300, which torch.float32 cannot",
    ),
    "too large for the precision": (
        lambda s: s | {"blocks.1.0.weight": pad(torch.tensor([[3.4e38]]), (12, 0, 12, 0))},
        "bf16",
        r"blocks.1.0.weight.* holds 3.4e\+38, which torch.bfloat16 cannot",
    ),
    "too large for what is frozen": (
        lambda s: s | {"frozen.bias": torch.full((13,), 7e4)},
        "fp16",
        "frozen.bias.* holds 70000, which torch.float16 cannot",
    ),
    "between whole numbers": (
        lambda s: s | {"calls": torch.tensor(17.5)},
        "fp32",
        "'calls' holds 17.5, which torch.int64 cannot",
    ),
}


@pytest.mark.usefixtures("cramped")
@pytest.mark.parametrize("difference", OTHERS)
@pytest.mark.parametrize("away", [False, True], ids=["memory", "disk"])
def test_weights_that_are_not_the_models_are_refused_and_the_model_stays(
    world: World, difference: str, away: bool
) -> None:
    change, precision, said = OTHERS[difference]
    world.on_root(torch.save, change(other_state()), world.folder / "w.pt")
    options = on_disk(world) if away else {}
    with program_of(world.comm, world.size, precision=precision, **options) as program:
        before = hpczero.full_state_dict(program.model)
        file = world.folder / "w.pt"
        world.raises(CheckpointMismatch, said, import_weights, file, program.model)
        world.check_state(hpczero.full_state_dict(program.model), before)
        program.train(1)  # nobody doubts it


def test_files_that_are_not_there_are_refused_on_all_ranks(world: World, model: MLP) -> None:
    world.raises(ConfigError, "no weights there", import_weights, world.folder, model)


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_gpt2_layout_comes_in(world: World, prefix: str) -> None:
    origin = tiny_gpt(seed=5)
    state = {prefix + name: value for name, value in theirs(origin).items()}
    state["lm_head.weight"] = state[prefix + "wte.weight"]
    world.on_root(torch.save, state, world.folder / "w.bin")
    with zeroified(tiny_gpt(), None, stage=3) as sharding:
        load = partial(import_weights, world.folder, sharding.model)
        world.raises(CheckpointMismatch, "give layout='gpt2'", load)
        load(layout="gpt2")
        found = hpczero.full_state_dict(sharding.model)
    world.check_state(found, origin.state_dict())


@pytest.mark.ranks(2)
def test_other_heads_are_refused_though_shapes_fit(world: World) -> None:
    config = json.dumps({"model_type": "gpt2", "n_head": 3, "n_embd": 18})
    world.on_root(save_file, theirs(tiny_gpt()), world.folder / "model.safetensors")
    world.on_root((world.folder / "config.json").write_text, config)
    with zeroified(tiny_gpt(), None) as sharding:
        load = partial(import_weights, world.folder, sharding.model, layout="gpt2")
        world.raises(CheckpointMismatch, "3 attention heads, and the model has 2", load)


@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_weights_that_are_not_the_same_on_all_ranks_are_refused(
    world: World, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the path is on a disk of each node's own."""
    (world.folder / str(world.rank)).mkdir()
    state = other_state()
    if world.rank == 1:
        state["blocks.1.0.weight"] = state["blocks.1.0.weight"] + 1
    path = write(world.folder / str(world.rank), state, kind)
    monkeypatch.chdir(world.folder / str(world.rank))
    with program_of(world.comm, world.size, stage=3) as program:
        said = r"on rank\(s\) 1, could not compare .*: other weights"
        world.raises(CheckpointMismatch, said, import_weights, path.name, program.model)
    monkeypatch.undo()


@pytest.mark.filterwarnings("ignore")  # theirs
def test_logits_are_those_of_transformers(world: World) -> None:
    """Tolerance: fp32 sums of 18 to 72 products in another order."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.GPT2Config(vocab_size=61, n_positions=11, n_embd=18, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    world.on_root(model.save_pretrained, world.folder / "hf")
    tokens = tiny_tokens(0)
    with zeroified(tiny_gpt().eval(), None, stage=3) as sharding, torch.no_grad():
        import_weights(world.folder / "hf", sharding.model, layout="gpt2")
        found, expected = sharding.model(tokens), model(tokens).logits
    difference = float((found - expected).abs().max())
    world.check(difference < 1e-5 * float(expected.abs().max()), str(difference))


def test_training_starts_from_a_checkpoint_of_weights(world: World) -> None:
    state = other_state()
    world.on_root(write, world.folder, state, "torch")
    world.on_root(
        convert, world.folder / "weights.pt", world.folder / "run", step=12, buffers=["mean"]
    )
    with program_of(world.comm, world.size, stage=2) as program:
        loaded = hpczero.checkpoint.load(world.folder / "run", program.model, program.optimizer)
        found = hpczero.full_state_dict(program.model)
        program.train(2)
    world.check((loaded.step, loaded.extra) == (12, {}))
    world.check_state(found, state)


# --- into a model on a tier: the bits of memory, in pieces; a refusal changes nothing


PLACES: dict[str, dict[str, Any]] = {
    "disk": {"optimizer": "disk", "gradients": "disk", "parameters": "disk"},
    "a part": {"optimizer": "host", "parameters": "host", "fraction": 0.5},
    "host's step": {"optimizer": "host", "gradients": "host", "step": "host"},
}


@pytest.mark.usefixtures("cramped")
@pytest.mark.parametrize("kind", ["torch", "safetensors"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("place", PLACES)
def test_weights_come_in_with_the_bits_of_memory_and_the_optimizer_stays(
    world: World, place: str, precision: str, kind: str
) -> None:
    state = other_state()
    world.on_root(write, world.folder, state, kind)
    (path,) = world.folder.iterdir()
    found = []
    for offload in (None, Offload(folder=world.folder, window=WINDOW, buffers=4, **PLACES[place])):
        program = Program(world.topology, stage=3, precision=precision, offload=offload)
        program.train(2)
        import_weights(path, program.model)
        now = hpczero.full_state_dict(program.model)
        losses = program.train(2)  # with the moments of before
        found.append((now, losses, hpczero.full_state_dict(program.model)))
        program.close()
    resident, away = found
    world.check_state(away[0], resident[0])
    world.check(away[1] == resident[1], f"{away[1]} {resident[1]}")
    world.check_state(away[2], resident[2])


@pytest.mark.usefixtures("cramped")
def test_a_tier_that_fails_meanwhile_is_one_error_and_another_import_goes_on(world: World) -> None:
    origin = once(dict(MLP(SIZES, seed=8).state_dict()))
    path = world.folder / "model.safetensors"
    world.on_root(save_file, origin, path)
    model = MLP(SIZES)
    with world.zeroified(model, optimizer := adamw(model), **on_disk(world)):
        for after in (0, 3):
            with failing(world, model, "_write", after, "EIO"):
                world.raises(TierError, "EIO", import_weights, path, model)
            with pytest.raises(StepError, match="load a checkpoint"):
                mlp_backward(model, world.rank)
        import_weights(path, model)
        world.check_state(hpczero.full_state_dict(model), origin)
        mlp_steps(model, optimizer, world.rank)
