"""Import: every rank gets its part of weights that another program wrote; those of another model change nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import hpczero
from hpczero import Offload
from hpczero.checkpoint import held
from hpczero.checkpoint.foreign import weight_files
from hpczero.checkpoint.foreign.converting import convert
from hpczero.errors import CheckpointMismatch, ConfigError, StepError, TierError
from tests.checkpoint.foreign import once, other_state, theirs, write
from tests.checkpoint.programs import Program, program_of
from tests.checkpoint.test_offloaded import SIZES, WINDOW, failing_on, on_disk
from tests.helpers.parallel import on_root, parallel_assert
from tests.helpers.small_models import (
    MLP,
    adamw,
    mlp_backward,
    raises_on_all,
    same_state,
    tiny_gpt,
    tiny_tokens,
    zeroified,
)

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["torch", "safetensors", "sharded"])
def test_weights_come_in_and_the_optimizer_stays(
    comm: MPI.Intracomm, folder: Path, kind: str, stage: int
) -> None:
    state = other_state()
    on_root(comm, write, folder, state, kind)
    (path,) = folder.iterdir()
    with program_of(comm, comm.size, stage=stage) as program:
        program.train(2)
        moments = [s["exp_avg"].clone() for s in program.optimizer.state.values()]
        hpczero.checkpoint.import_weights(path, program.model)
        found = hpczero.full_state_dict(program.model)
        kept = [s["exp_avg"] for s in program.optimizer.state.values()]
        parallel_assert(comm, all(map(torch.equal, moments, kept)))
        parallel_assert(comm, int(program.model.get_buffer("calls")) == 41)
        program.train(1)  # goes on
    parallel_assert(comm, same_state(found, state))


@pytest.mark.ranks(1, 2, 3)
def test_weights_that_are_no_numbers_are_told_once(
    comm: MPI.Intracomm, program: Program, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = once(other_state())
    state["head.weight"] = torch.full_like(state["head.weight"], torch.nan)
    on_root(comm, save_file, state, folder / "model.safetensors")
    hpczero.checkpoint.import_weights(folder, program.model)
    told = [record.getMessage() for record in caplog.records if "no number" in record.getMessage()]
    every = [line for lines in comm.allgather(told) for line in lines]
    parallel_assert(comm, len(every) == 1 and "head.weight" in every[0], str(every))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_floating_dtype_becomes_fp32(
    comm: MPI.Intracomm, folder: Path, dtype: torch.dtype
) -> None:
    state = other_state()
    cast = {n: v.to(dtype) if v.dtype is torch.float32 else v for n, v in once(state).items()}
    on_root(comm, save_file, cast, folder / "model.safetensors")
    expected = {name: cast.get(name, cast["embed.weight"]).to(v.dtype) for name, v in state.items()}
    for name in ("frozen.weight", "frozen.bias"):  # no optimizer, so no master
        expected[name] = expected[name].bfloat16().float()
    with program_of(comm, comm.size, precision="bf16") as program:
        hpczero.checkpoint.import_weights(folder, program.model)
        found = hpczero.full_state_dict(program.model)
    parallel_assert(comm, same_state(found, expected))


def without(state: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if name not in names}


OTHERS: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "names and shapes": (
        lambda s: (
            without(s, "mean", "frozen.bias")
            | {"more": torch.ones(1), "head.weight": torch.ones(13, 7)}
        ),
        r"they have no frozen.bias, mean; the model has no more; head.weight is \(13, 7\) in the "
        r"file and \(7, 13\) in the model. Build the model",
    ),
    "whole numbers": (
        lambda s: s | {"head.weight": torch.ones(7, 13, dtype=torch.int8)},
        "head.weight is torch.int8 in the file, expected floating",
    ),
    "untied": (
        lambda s: s | {"back.weight": s["back.weight"] + 1},
        "embed.weight and back.weight are tied in the model and",
    ),
}


@pytest.mark.parametrize("difference", OTHERS)
def test_weights_of_another_model_are_refused_and_the_model_stays(
    comm: MPI.Intracomm, program: Program, folder: Path, difference: str
) -> None:
    change, said = OTHERS[difference]
    on_root(comm, torch.save, change(other_state()), folder / "w.pt")
    before = hpczero.full_state_dict(program.model)
    load = partial(hpczero.checkpoint.import_weights, folder / "w.pt", program.model)
    raises_on_all(comm, CheckpointMismatch, said, load)
    parallel_assert(comm, same_state(hpczero.full_state_dict(program.model), before))


def test_files_that_are_not_there_are_refused_on_all_ranks(
    comm: MPI.Intracomm, model: MLP, folder: Path
) -> None:
    load = partial(hpczero.checkpoint.import_weights, folder, model)
    raises_on_all(comm, ConfigError, "no weights there", load)


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_gpt2_layout_comes_in(comm: MPI.Intracomm, folder: Path, prefix: str) -> None:
    origin = tiny_gpt(seed=5)
    state = {prefix + name: value for name, value in theirs(origin).items()}
    state["lm_head.weight"] = state[prefix + "wte.weight"]
    on_root(comm, torch.save, state, folder / "w.bin")
    with zeroified(tiny_gpt(), None, stage=3) as sharding:
        load = partial(hpczero.checkpoint.import_weights, folder, sharding.model)
        raises_on_all(comm, CheckpointMismatch, "give layout='gpt2'", load)
        load(layout="gpt2")
        found = hpczero.full_state_dict(sharding.model)
    parallel_assert(comm, same_state(found, origin.state_dict()))


@pytest.mark.ranks(2)
def test_other_heads_are_refused_though_shapes_fit(comm: MPI.Intracomm, folder: Path) -> None:
    config = json.dumps({"model_type": "gpt2", "n_head": 3, "n_embd": 18})
    on_root(comm, save_file, theirs(tiny_gpt()), folder / "model.safetensors")
    on_root(comm, (folder / "config.json").write_text, config)
    with zeroified(tiny_gpt(), None) as sharding:
        load = partial(hpczero.checkpoint.import_weights, folder, sharding.model, layout="gpt2")
        raises_on_all(comm, CheckpointMismatch, "3 attention heads, and the model has 2", load)


@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_weights_that_are_not_the_same_on_all_ranks_are_refused(
    comm: MPI.Intracomm, folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the path is on a disk of each node's own."""
    (folder / str(comm.rank)).mkdir()
    state = other_state()
    if comm.rank == 1:
        state["blocks.1.0.weight"] = state["blocks.1.0.weight"] + 1
    path = write(folder / str(comm.rank), state, kind)
    monkeypatch.chdir(folder / str(comm.rank))
    with program_of(comm, comm.size, stage=3) as program:
        load = partial(hpczero.checkpoint.import_weights, path.name, program.model)
        said = r"on rank\(s\) 1, could not compare .*: other weights"
        raises_on_all(comm, CheckpointMismatch, said, load)
    monkeypatch.undo()


@pytest.mark.filterwarnings("ignore")  # theirs
def test_logits_are_those_of_transformers(comm: MPI.Intracomm, folder: Path) -> None:
    """Tolerance: fp32 sums of 18 to 72 products in another order."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.GPT2Config(vocab_size=61, n_positions=11, n_embd=18, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    on_root(comm, model.save_pretrained, folder / "hf")
    tokens = tiny_tokens(0)
    with zeroified(tiny_gpt().eval(), None, stage=3) as sharding, torch.no_grad():
        hpczero.checkpoint.import_weights(folder / "hf", sharding.model, layout="gpt2")
        found, expected = sharding.model(tokens), model(tokens).logits
    difference = float((found - expected).abs().max())
    parallel_assert(comm, difference < 1e-5 * float(expected.abs().max()), str(difference))


def test_training_starts_from_a_checkpoint_of_weights(comm: MPI.Intracomm, folder: Path) -> None:
    state = other_state()
    on_root(comm, write, folder, state, "torch")
    on_root(comm, convert, folder / "weights.pt", folder / "run", step=12, buffers=["mean"])
    with program_of(comm, comm.size, stage=2) as program:
        loaded = hpczero.checkpoint.load(folder / "run", program.model, program.optimizer)
        found = hpczero.full_state_dict(program.model)
        program.train(2)
    parallel_assert(comm, (loaded.step, loaded.extra) == (12, {}))
    parallel_assert(comm, same_state(found, state))


# --- into a model on a tier: the bits of memory, in pieces; a refusal changes nothing


@pytest.fixture
def cramped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pieces, and hardly a window stays open."""
    monkeypatch.setattr(weight_files, "CHUNK_NUMEL", 700)
    monkeypatch.setattr(held, "OPEN_NBYTES", WINDOW // 2)


OFFLOADED = pytest.mark.usefixtures("cramped")
PLACES: dict[str, dict[str, Any]] = {
    "disk": {"optimizer": "disk", "gradients": "disk", "parameters": "disk"},
    "a part": {"optimizer": "host", "parameters": "host", "fraction": 0.5},
    "host's step": {"optimizer": "host", "gradients": "host", "step": "host"},
}


@OFFLOADED
@pytest.mark.parametrize("kind", ["torch", "safetensors"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("place", PLACES)
def test_weights_come_in_with_the_bits_of_memory_and_the_optimizer_stays(
    comm: MPI.Intracomm, topology: Topology, folder: Path, place: str, precision: str, kind: str
) -> None:
    state = other_state()
    on_root(comm, write, folder, state, kind)
    (path,) = folder.iterdir()
    found = []
    for offload in (None, Offload(folder=folder, window=WINDOW, buffers=4, **PLACES[place])):
        program = Program(topology, stage=3, precision=precision, offload=offload)
        program.train(2)
        hpczero.checkpoint.import_weights(path, program.model)
        now = hpczero.full_state_dict(program.model)
        losses = program.train(2)  # with the moments of before
        found.append((now, losses, hpczero.full_state_dict(program.model)))
        program.close()
    resident, away = found
    parallel_assert(comm, same_state(away[0], resident[0]))
    parallel_assert(comm, away[1] == resident[1], f"{away[1]} {resident[1]}")
    parallel_assert(comm, same_state(away[2], resident[2]))


@OFFLOADED
def test_what_is_refused_leaves_the_model_as_it_was(
    comm: MPI.Intracomm, topology: Topology, folder: Path
) -> None:
    state = other_state()
    untied = {**state, "back.weight": state["back.weight"] + 1}
    large = {name: value.clone() for name, value in state.items()}
    large["blocks.1.0.weight"][-1, -1] = 3.4e38  # rounds to infinity in bf16
    program = Program(topology, precision="bf16", **on_disk(folder))
    before = hpczero.full_state_dict(program.model)
    for name, weights, message in (
        ("a.pt", untied, "embed.weight and back.weight are tied in the model and"),
        ("b.pt", large, r"blocks.1.0.weight.* holds 3.4e\+38, which torch.bfloat16 cannot"),
        ("c.pt", {}, "they have no"),
    ):
        on_root(comm, torch.save, weights, folder / name)
        load = partial(hpczero.checkpoint.import_weights, folder / name, program.model)
        raises_on_all(comm, CheckpointMismatch, message, load)
        parallel_assert(comm, same_state(hpczero.full_state_dict(program.model), before), name)
    program.train(1)  # nobody doubts it
    program.close()


@OFFLOADED
def test_a_tier_that_fails_meanwhile_is_one_error_and_another_import_goes_on(
    comm: MPI.Intracomm, topology: Topology, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = once(dict(MLP(SIZES, seed=8).state_dict()))
    path = folder / "model.safetensors"
    on_root(comm, save_file, origin, path)
    model = MLP(SIZES)
    with zeroified(model, adamw(model), topology=topology, **on_disk(folder)) as state:
        store = state.away.store
        assert store is not None
        for count in (0, 3):
            with monkeypatch.context() as patch:
                if comm.rank == comm.size - 1:
                    failing_on(patch, store.tier, "_write", count, TierError("EIO"))
                load = partial(hpczero.checkpoint.import_weights, path, model)
                raises_on_all(comm, TierError, "EIO", load)
            with pytest.raises(StepError, match="load a checkpoint"):
                mlp_backward(model, comm.rank)
        hpczero.checkpoint.import_weights(path, model)
        parallel_assert(comm, same_state(hpczero.full_state_dict(model), origin))
        mlp_backward(model, comm.rank)
        next(iter(state.optimizers)).step()
