"""Import: every rank gets its part of weights that another program wrote; those of another model change nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

import hpczero
from hpczero.checkpoint.disk.folder import Folder, read_manifest
from hpczero.checkpoint.disk.lock import Lock
from hpczero.checkpoint.foreign.converting import convert
from hpczero.checkpoint.foreign.exporting import Form, export
from hpczero.checkpoint.foreign.weight_files import WeightFiles, smallest_box
from hpczero.checkpoint.verify import Verdict, verify
from hpczero.errors import CheckpointError, CheckpointMismatch, ConfigError
from tests.checkpoint.foreign import (
    INDEX,
    on_root,
    once,
    other_state,
    same,
    theirs,
    write,
    write_sharded,
)
from tests.checkpoint.programs import Net, Program, first_ranks
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import raises_on_all, tiny_gpt, tiny_tokens, zeroified

if TYPE_CHECKING:
    from mpi4py import MPI


# --- one process -----------------------------------------------------------------------------------------------------


@given(shape=st.lists(st.integers(1, 5), max_size=4), data=st.data())
def test_box_holds_the_range_and_little_more(shape: list[int], data: Any) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    start = data.draw(st.integers(0, tensor.numel() - 1))
    stop = data.draw(st.integers(start + 1, tensor.numel()))
    box, skip = smallest_box(tuple(shape), start, stop)
    part = tensor[box]
    found = part.reshape(-1)[skip : skip + stop - start]
    assert torch.equal(found, torch.arange(start, stop))
    one_row = part.numel() // (box[-1].stop - box[-1].start) if box else 1
    assert part.numel() < stop - start + 2 * one_row


def test_import_that_waited_for_another_is_refused_as_one_that_comes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have seen an empty folder."""
    weights = write(tmp_path, other_state(), "safetensors")
    out, acquire = tmp_path / "out", Lock.acquire

    def after_another(lock: Lock, patience_s: float = 0.0) -> None:
        monkeypatch.setattr(Lock, "acquire", acquire)
        convert(weights, out, step=5)
        acquire(lock, patience_s)

    monkeypatch.setattr(Lock, "acquire", after_another)
    with pytest.raises(ConfigError, match="holds checkpoints already"):
        convert(weights, out, step=7)
    assert [manifest.step for _, manifest in Folder(out).valid()] == [5]


@pytest.mark.parametrize("kind", ["torch", "safetensors", "sharded"])
def test_any_range_is_read_from_any_file(tmp_path: Path, kind: str) -> None:
    state = other_state()
    weights = WeightFiles(write(tmp_path, state, kind))
    for name, held in weights.items():
        flat = state[name].reshape(-1)
        for start in range(0, held.numel, 5):
            for stop in (start + 1, (start + held.numel + 1) // 2, held.numel):
                pieces = list(held.pieces(start, max(stop, start)))
                found = torch.cat(pieces) if pieces else torch.empty(0)
                assert torch.equal(found, flat[start : max(stop, start)].float()), name


def test_files_that_are_not_weights_are_refused(tmp_path: Path) -> None:
    def refuses(kind: type[Exception], message: str, path: Path, **options: Any) -> None:
        with pytest.raises(kind, match=message):
            WeightFiles(path, **options)

    refuses(ConfigError, "no such file", tmp_path / "none.pt")
    refuses(ConfigError, "no weights there", tmp_path)
    refuses(ConfigError, "layout: got 'x', expected one of hpczero, gpt2", tmp_path, layout="x")
    torch.save({"model": {"a": torch.ones(1)}}, tmp_path / "nested.pt")
    refuses(CheckpointError, "'model' is a dict, expected tensors only", tmp_path / "nested.pt")
    torch.save({"model": Net()}, tmp_path / "pickle.pt")
    refuses(CheckpointError, "cannot read it with weights_only=True", tmp_path / "pickle.pt")
    torch.save([torch.ones(1)], tmp_path / "list.pt")
    refuses(CheckpointError, "holds a list, expected a state_dict", tmp_path / "list.pt")
    (tmp_path / "short.safetensors").write_bytes(b"x" * 20)
    refuses(CheckpointError, "no safetensors file, or damaged", tmp_path / "short.safetensors")
    (tmp_path / "x.safetensors").write_bytes(b"")
    refuses(ConfigError, "holds several sets of weights", tmp_path)


def test_index_must_fit_its_files(tmp_path: Path) -> None:
    write_sharded(tmp_path / "w", once(other_state()))
    index = tmp_path / "w" / INDEX
    places = json.loads(index.read_text())["weight_map"]

    def refuses(message: str, changed: dict[str, Any]) -> None:
        index.write_text(json.dumps(changed))
        with pytest.raises(CheckpointError, match=message):
            WeightFiles(tmp_path / "w")

    refuses(
        "'lost' in the index and in no file",
        {"weight_map": {**places, "lost": places["head.weight"]}},
    )
    refuses("1 of its 4 files are not there", {"weight_map": {**places, "a": "b.safetensors"}})
    refuses("expected files in its own folder", {"weight_map": {"a": "../b.safetensors"}})
    refuses("has no 'weight_map'", {})


def test_checkpoint_of_weights_is_sound_and_exports_the_same(tmp_path: Path) -> None:
    state = other_state()
    path = convert(write(tmp_path, state, "torch"), tmp_path / "run", buffers=["mean"])
    assert path.name == "step-000000000"
    assert verify(path).verdict is Verdict.SOUND
    export(path, tmp_path / "out.pt", Form(format="torch"))
    assert same(torch.load(tmp_path / "out.pt", weights_only=True), state)
    with pytest.raises(ConfigError, match="holds checkpoints already"):
        convert(tmp_path / "weights.pt", tmp_path / "run")
    with pytest.raises(ConfigError, match="cannot tie x to y: there is no such parameter"):
        convert(tmp_path / "weights.pt", tmp_path / "more", tied={"x": "y"})


def test_our_own_export_tells_what_is_tied_and_what_are_buffers(tmp_path: Path) -> None:
    first = convert(write(tmp_path, other_state(), "torch"), tmp_path / "a", buffers=["mean"])
    export(first, tmp_path / "out")
    second = convert(tmp_path / "out", tmp_path / "b")
    one, other = read_manifest(first), read_manifest(second)
    assert {row.name for row in one.table.rows} == {row.name for row in other.table.rows}
    assert sorted(one.meta["buffers"]) == sorted(other.meta["buffers"])
    assert {r.name for r in other.table.rows if r.tied_to is not None} == {"back.weight"}


def test_gpt2_becomes_a_checkpoint_that_exports_the_same(tmp_path: Path) -> None:
    state = theirs(tiny_gpt())
    save_file(state, tmp_path / "model.safetensors")
    path = convert(tmp_path, tmp_path / "run", layout="gpt2")
    export(path, tmp_path / "out", Form(layout="gpt2", heads=2))
    found = dict(WeightFiles(tmp_path / "out").items())
    masks = [name for name in state if name.endswith((".attn.bias", "masked_bias"))]
    assert {f"transformer.{name}" for name in state if name not in masks} == found.keys()
    assert all(torch.equal(held.whole(), state[name[12:]]) for name, held in found.items())
    again = convert(tmp_path / "out", tmp_path / "again", layout="gpt2")
    assert read_manifest(again).meta["extra"]["model"]["heads"] == 2


def test_other_weights_are_no_gpt2(tmp_path: Path) -> None:
    state = theirs(tiny_gpt())
    del state["h.1.ln_2.bias"]
    save_file({**state, "h.0.attn.c_key.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointMismatch, match=r"there is no h\.1\.ln_2\.bias; GPT-2 has no h\.0"
    ):
        convert(tmp_path, tmp_path / "run", layout="gpt2")
    config = {"model_type": "gpt2", "activation_function": "relu"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointMismatch, match="activation_function is 'relu', expected 'gelu_new'"
    ):
        WeightFiles(tmp_path, layout="gpt2")


# --- into a model in training ----------------------------------------------------------------------------------------


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
