"""Import: every rank gets its part of weights that another program wrote; those of another model change nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import hpczero
from hpczero.checkpoint.foreign.converting import convert
from hpczero.errors import CheckpointMismatch, ConfigError
from tests.checkpoint.foreign import (
    on_root,
    once,
    other_state,
    same,
    theirs,
    write,
)
from tests.checkpoint.programs import Net, Program, first_ranks
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import raises_on_all, tiny_gpt, tiny_tokens, zeroified

if TYPE_CHECKING:
    from mpi4py import MPI


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["torch", "safetensors", "sharded"])
def test_weights_come_in_and_the_optimizer_stays(
    comm: MPI.Intracomm, folder: Path, kind: str, stage: int
) -> None:
    state = other_state()
    on_root(comm, lambda: write(folder, state, kind))
    path = comm.bcast(next(folder.iterdir()) if comm.rank == 0 else None)
    with first_ranks(comm, comm.size) as topology:
        assert topology is not None
        program = Program(topology, stage=stage)
        program.train(2)
        moments = [s["exp_avg"].clone() for s in program.optimizer.state.values()]
        hpczero.checkpoint.import_weights(path, program.model)
        found = hpczero.full_state_dict(program.model)
        kept = [s["exp_avg"] for s in program.optimizer.state.values()]
        unchanged = all(torch.equal(a, b) for a, b in zip(moments, kept, strict=True))
        calls = int(program.model.get_buffer("calls"))
        program.train(1)  # goes on
        program.close()
    parallel_assert(comm, unchanged)
    parallel_assert(comm, calls == 41)
    parallel_assert(comm, same(found, state))


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 3)
def test_weights_that_are_no_numbers_are_told_once(
    comm: MPI.Intracomm, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {name: value.clone() for name, value in once(other_state()).items()}
    name = next(
        name for name, value in state.items() if value.ndim == 2 and value.is_floating_point()
    )
    state[name].fill_(torch.nan)
    on_root(comm, lambda: save_file(state, folder / "model.safetensors"))
    with first_ranks(comm, comm.size) as topology:
        assert topology is not None
        program = Program(topology)
        hpczero.checkpoint.import_weights(folder, program.model)
        program.close()
    told = [record.getMessage() for record in caplog.records if "no number" in record.getMessage()]
    every = [line for lines in comm.allgather(told) for line in lines]
    parallel_assert(comm, len(every) == 1 and name in every[0], str(every))


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_floating_dtype_becomes_fp32(
    comm: MPI.Intracomm, folder: Path, dtype: torch.dtype
) -> None:
    state = other_state()
    cast = {n: v.to(dtype) if v.dtype is torch.float32 else v for n, v in once(state).items()}
    on_root(comm, lambda: save_file(cast, folder / "model.safetensors"))
    expected = {name: cast.get(name, cast["embed.weight"]).to(v.dtype) for name, v in state.items()}
    for name in ("frozen.weight", "frozen.bias"):  # no optimizer, so no master
        expected[name] = expected[name].bfloat16().float()
    with first_ranks(comm, comm.size) as topology:
        assert topology is not None
        program = Program(topology, precision="bf16")
        hpczero.checkpoint.import_weights(folder, program.model)
        found = hpczero.full_state_dict(program.model)
        program.close()
    parallel_assert(comm, same(found, expected))


def refused(comm: MPI.Intracomm, file: Path, state: dict[str, Tensor], message: str) -> None:
    """On every rank, and the model is as it was."""
    on_root(comm, lambda: torch.save(state, file))
    with first_ranks(comm, comm.size) as topology:
        assert topology is not None
        program = Program(topology)
        before = hpczero.full_state_dict(program.model)

        def call() -> None:
            hpczero.checkpoint.import_weights(file, program.model)

        raises_on_all(comm, CheckpointMismatch, message, call)
        after = hpczero.full_state_dict(program.model)
        program.close()
    parallel_assert(comm, before is None or same(after, before))


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_weights_of_another_model_are_listed(comm: MPI.Intracomm, folder: Path) -> None:
    state = other_state()
    other = {**state, "more": torch.ones(1), "head.weight": torch.ones(13, 7)}
    del other["mean"], other["frozen.bias"]
    message = (
        r"they have no frozen.bias, mean; the model has no more; "
        r"head.weight is \(13, 7\) in the file and \(7, 13\) in the model. Build the model"
    )
    refused(comm, folder / "a.pt", other, message)
    whole = {**state, "head.weight": torch.ones(7, 13, dtype=torch.int8)}
    refused(
        comm, folder / "b.pt", whole, "head.weight is torch.int8 in the file, expected floating"
    )
    untied = {**state, "back.weight": state["back.weight"] + 1}
    refused(comm, folder / "c.pt", untied, "embed.weight and back.weight are tied in the model and")


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_files_that_are_not_there_are_refused_on_all_ranks(
    comm: MPI.Intracomm, folder: Path
) -> None:
    with zeroified(Net(), None, stage=3) as sharding:

        def call() -> None:
            hpczero.checkpoint.import_weights(folder, sharding.model)

        raises_on_all(comm, ConfigError, "no weights there", call)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_gpt2_layout_comes_in(comm: MPI.Intracomm, folder: Path, prefix: str) -> None:
    origin = tiny_gpt(seed=5)
    state = {prefix + name: value for name, value in theirs(origin).items()}
    state["lm_head.weight"] = state[prefix + "wte.weight"]
    on_root(comm, lambda: torch.save(state, folder / "w.bin"))
    with zeroified(tiny_gpt(), None, stage=3) as sharding:
        raises_on_all(
            comm,
            CheckpointMismatch,
            "give layout='gpt2'",
            lambda: hpczero.checkpoint.import_weights(folder, sharding.model),
        )
        hpczero.checkpoint.import_weights(folder, sharding.model, layout="gpt2")
        found = hpczero.full_state_dict(sharding.model)
    parallel_assert(comm, same(found, origin.state_dict()))


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_other_heads_are_refused_though_shapes_fit(comm: MPI.Intracomm, folder: Path) -> None:
    config = json.dumps({"model_type": "gpt2", "n_head": 3, "n_embd": 18})
    on_root(comm, lambda: save_file(theirs(tiny_gpt()), folder / "model.safetensors"))
    on_root(comm, lambda: (folder / "config.json").write_text(config))
    with zeroified(tiny_gpt(), None) as sharding:
        raises_on_all(
            comm,
            CheckpointMismatch,
            "3 attention heads, and the model has 2",
            lambda: hpczero.checkpoint.import_weights(folder, sharding.model, layout="gpt2"),
        )


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
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
    with first_ranks(comm, comm.size) as topology:
        assert topology is not None
        program = Program(topology, stage=3)
        raises_on_all(
            comm,
            CheckpointMismatch,
            r"on rank\(s\) 1, could not compare .*: other weights",
            lambda: hpczero.checkpoint.import_weights(path.name, program.model),
        )
        program.close()
    monkeypatch.undo()


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
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
    on_root(comm, lambda: model.save_pretrained(folder / "hf"))
    tokens = tiny_tokens(0)
    with zeroified(tiny_gpt().eval(), None, stage=3) as sharding, torch.no_grad():
        hpczero.checkpoint.import_weights(folder / "hf", sharding.model, layout="gpt2")
        found, expected = sharding.model(tokens), model(tokens).logits
    difference = float((found - expected).abs().max())
    print(f"largest difference {difference:.2e} of {float(expected.abs().max()):.2f}")
    parallel_assert(comm, difference < 1e-5 * float(expected.abs().max()), str(difference))


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_training_starts_from_a_checkpoint_of_weights(comm: MPI.Intracomm, folder: Path) -> None:
    state = other_state()
    on_root(
        comm,
        lambda: convert(write(folder, state, "torch"), folder / "run", step=12, buffers=["mean"]),
    )
    with first_ranks(comm, comm.size) as topology:
        assert topology is not None
        program = Program(topology, stage=2)
        loaded = hpczero.checkpoint.load(folder / "run", program.model, program.optimizer)
        found = hpczero.full_state_dict(program.model)
        losses = program.train(2)
        program.close()
    parallel_assert(comm, (loaded.step, loaded.extra) == (12, {}))
    parallel_assert(comm, same(found, state))
    parallel_assert(comm, all(isinstance(loss, float) for loss in losses))
