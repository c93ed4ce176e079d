"""Folders of torch.distributed.checkpoint, as torch alone writes and reads them, to and from our checkpoints."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as torch_load
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

from hpczero.checkpoint.disk.folder import read_manifest
from hpczero.checkpoint.disk.stored import Stored
from hpczero.checkpoint.foreign import dcp_writing
from hpczero.checkpoint.foreign.converting import convert
from hpczero.checkpoint.foreign.exporting import WeightsForm, export
from hpczero.errors import CheckpointError, ConfigError
from hpczero.job.team import Ranks
from tests.checkpoint.programs import Net, two_groups
from tests.helpers.world import World

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, that nothing is distributed

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
LOOSE = StateDictOptions(strict=False)  # one parameter never has a gradient, and so no state
LAYOUTS = ["dcp", "torchtitan"]


class Program:
    """Torch alone: tied, frozen and empty parameters, buffers, two groups; a state for what trains."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(seed)
        self.model: nn.Module = Net()
        self.model.to(dtype)
        self.optimizer = torch.optim.AdamW(two_groups(self.model.parameters()), lr=1e-2)
        for _ in range(3):
            x = torch.randn(5, 7).to(dtype)
            self.model(x).mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self, layout: str) -> dict[str, Any]:
        weights = get_model_state_dict(self.model)
        if layout == "dcp":
            return {
                "model": weights,
                "optim": get_optimizer_state_dict(self.model, self.optimizer),
            }
        optimizer = get_optimizer_state_dict(self.model, self.optimizer, options=FLAT)
        return {**weights, "optimizer": optimizer}

    def save(self, folder: Path, layout: str, **more: Any) -> Path:
        state = {**self.state(layout), **more}
        torch_save(state, checkpoint_id=folder, no_dist=True)
        return folder

    def load(self, folder: Path, layout: str) -> None:
        state = self.state(layout)
        torch_load(state, checkpoint_id=folder, no_dist=True)
        optimizer = state.pop("optim" if layout == "dcp" else "optimizer")
        set_model_state_dict(self.model, state.get("model", state))
        options = LOOSE if layout == "dcp" else FLAT
        set_optimizer_state_dict(self.model, self.optimizer, optimizer, options=options)

    def bits(self) -> dict[str, bytes]:
        """Of all that a load sets."""
        found = dict(self.model.state_dict())
        found |= {
            f"{name}.{key}": value
            for name, p in self.model.named_parameters()
            for key, value in self.optimizer.state.get(p, {}).items()
        }
        return {name: bits(value) for name, value in found.items()}


def bits(value: Tensor) -> bytes:
    return value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def stored(path: Path, dataset: str, name: str) -> Tensor:
    with Stored(path) as held:
        row = held.manifest.table.named()[name]
        parts = [part.copy() for part in held.read(dataset, row.offset, row.offset + row.numel)]
    return torch.from_numpy(np.concatenate([*parts, np.empty(0, "<f4")])).view(row.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_torch_saved_comes_back_to_torch_by_a_checkpoint_of_ours(
    tmp_path: Path, layout: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit: weights, moments and steps, options of two groups, buffers; in chunks of a few rows."""
    monkeypatch.setattr(dcp_writing, "CHUNK_NBYTES", 300)
    before = Program(1, dtype)
    folder = before.save(tmp_path / "theirs", layout)
    path = convert(folder, tmp_path / "run", buffers=["mean"])
    assert path.name == "step-000000003"
    for name, parameter in before.model.named_parameters():
        assert torch.equal(stored(path, "/state/master", name), parameter.float()), name
        for key, value in before.optimizer.state.get(parameter, {}).items():
            if value.dim():
                assert torch.equal(stored(path, f"/state/{key}", name), value.float()), (name, key)
    form = WeightsForm(layout=layout, dtype="bf16" if dtype == torch.bfloat16 else "fp32")
    found = export(path, tmp_path / "ours", form)
    after = Program(2, dtype)
    after.optimizer.param_groups[0]["lr"] = 7.0
    after.load(tmp_path / "ours", layout)
    assert after.bits() == before.bits()
    for mine, theirs in zip(
        after.optimizer.param_groups, before.optimizer.param_groups, strict=True
    ):
        assert {**mine, "params": 0} == {**theirs, "params": 0}
    count = len(before.bits())
    assert found.num_tensors == count


def test_chunks_of_columns_are_one_tensor_and_a_lost_one_is_named(tmp_path: Path) -> None:
    """As tensor parallelism saves them."""
    value = torch.randn(5, 7)

    class Columns(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            first, count = write_item.index.offset[1], write_item.tensor_data.chunk.sizes[1]
            return value[:, first : first + count].clone()

    planner = Columns()
    planner.set_up_planner({"model": {"weight": value}}, is_coordinator=True)
    (item,) = planner.create_local_plan().items
    items = []
    for first, count in ((0, 3), (3, 4)):
        offsets = torch.Size([0, first])
        chunk = ChunkStorageMetadata(offsets, torch.Size([5, count]))
        data = replace(item.tensor_data, chunk=chunk)  # type: ignore[type-var]
        index = replace(item.index, offset=offsets)
        kind = type(item.type)["SHARD"]
        items.append(replace(item, index=index, type=kind, tensor_data=data))
    for name, kept in (("whole", items), ("lost", items[:1])):
        writer = FileSystemWriter(tmp_path / name)
        plans, metadata = create_default_global_save_plan([SavePlan(kept)])
        (tmp_path / name).mkdir()
        results = writer.write_data(writer.prepare_global_plan(plans)[0], planner).wait()
        writer.finish(replace(metadata, planner_data=planner.mappings), [results])
    path = convert(tmp_path / "whole", tmp_path / "run")
    assert torch.equal(stored(path, "/state/master", "weight"), value)
    with pytest.raises(
        CheckpointError, match=r"'model.weight': its chunks overlap.*15 of 35 elements"
    ):
        convert(tmp_path / "lost", tmp_path / "other")
    assert not list((tmp_path / "other").glob("step-*"))


class Poison:
    """A pickle that runs a program."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, (self.command,)


def test_a_pickle_that_runs_a_program_is_refused_by_name_and_runs_nothing(tmp_path: Path) -> None:
    poison = Poison(f"touch {tmp_path}/ran")
    folder = Program().save(tmp_path / "theirs", "dcp")
    told = pickle.loads((folder / ".metadata").read_bytes())
    index, place = next(
        (i, p) for i, p in told.storage_data.items() if i.fqn.endswith("embed.weight")
    )
    (folder / ".metadata").write_bytes(pickle.dumps([told, poison]))
    with pytest.raises(
        CheckpointError, match=r"\.metadata: names 'posix.system'.* nothing was run"
    ):
        convert(folder, tmp_path / "run")
    data = io.BytesIO()
    torch.save(poison, data)
    (folder / "poison.distcp").write_bytes(data.getvalue())
    told.storage_data[index] = replace(
        place, relative_path="poison.distcp", offset=0, length=len(data.getvalue())
    )
    (folder / ".metadata").write_bytes(pickle.dumps(told))
    with pytest.raises(
        CheckpointError, match=r"poison.distcp: damaged at .*embed.weight.*Weights only load"
    ):
        convert(folder, tmp_path / "run")
    assert not (tmp_path / "ran").exists()


def test_what_is_no_whole_checkpoint_is_refused(tmp_path: Path) -> None:
    program = Program()
    folder = program.save(tmp_path / "theirs", "dcp")

    def refuses(message: str, path: Path, **options: Any) -> None:
        with pytest.raises((CheckpointError, ConfigError), match=message):
            convert(path, tmp_path / "run", **options)

    broken = Path(shutil.copytree(folder, tmp_path / "unfinished"))
    (broken / ".metadata").unlink()
    refuses(r"has no \.metadata, which torch.distributed.checkpoint writes last", broken)
    broken = Path(shutil.copytree(folder, tmp_path / "flipped"))
    data = bytearray((broken / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (broken / "__0_0.distcp").write_bytes(data)
    refuses(r"__0_0.distcp: damaged at '", broken)
    numbered = {"model": program.model.state_dict(), "optim": program.optimizer.state_dict()}
    torch_save(numbered, checkpoint_id=tmp_path / "numbers", no_dist=True)
    refuses("names a parameter by its number", tmp_path / "numbers")
    weights = convert(tmp_path / "numbers", tmp_path / "alone", optimizer=None)
    with Stored(weights) as held:
        assert held.manifest.meta["optimizer"] is None
    assert not (tmp_path / "run").exists()


def test_what_is_not_understood_is_left_out_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"step": 3, "tokens": torch.tensor(5)}
    folder = Program().save(tmp_path / "theirs", "torchtitan", train_state=state)
    convert(folder, tmp_path / "run", buffers=["mean"])
    assert (
        "neither weight nor state of an optimizer: train_state.step, train_state.tokens"
        in caplog.text
    )
    assert "taken for tied, by equal values: back.weight to embed.weight" in caplog.text


def test_equal_values_are_taken_for_tied_where_they_tell_and_options_of_groups_keep_their_form(
    tmp_path: Path,
) -> None:
    schedule = {"kind": "cosine", "falls": [{"at": 3}, {"at": torch.tensor(4.0)}]}
    names = ["a", "one"]
    state = {
        "state": {n: {"exp_avg": torch.ones(4), "step": torch.tensor(2.0)} for n in names},
        "param_groups": [{"params": names, "lr": 0.1, "decay": schedule}],
    }
    weights = {"a": torch.arange(4.0), "again": torch.arange(4.0), "frozen": torch.ones(4)}
    content = {"model": {**weights, "one": torch.ones(4), "mean": torch.arange(4.0)}, "o": state}
    folder = saved(tmp_path / "theirs", content)
    for tied, expected in (({}, {"again": "a"}), ({"again": "again"}, {})):
        path = convert(folder, tmp_path / f"run{len(tied)}", buffers=["mean"], tied=tied)
        manifest = read_manifest(path)
        rows = manifest.table.rows
        found = {row.name: rows[row.tied_to].name for row in rows if row.tied_to is not None}
        assert found == expected
        (group,) = manifest.meta["optimizer"]["groups"]
        assert group["decay"] == {"kind": "cosine", "falls": [{"at": 3}, {"at": 4.0}]}


@pytest.mark.mpi
def test_all_ranks_write_and_read_what_one_would(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp_writing, "CHUNK_NBYTES", 300)
    team = Ranks(world.topology)
    here, before = world.folder, Program(1)
    world.on_root(before.save, here / "theirs", "dcp")
    form = WeightsForm(layout="dcp")
    path = convert(here / "theirs", here / "run", buffers=["mean"], team=team)
    export(path, here / "ours", form, team=team)
    world.check(len(list((here / "ours").glob("*.distcp"))) >= world.size)
    after = Program(2)
    after.load(here / "ours", "dcp")
    world.check(after.bits() == before.bits())
    if world.rank == 0:
        alone = convert(here / "theirs", here / "alone", buffers=["mean"])
        with Stored(alone) as one, Stored(path) as many:
            same = [d.digests for d in one.manifest.datasets] == [
                d.digests for d in many.manifest.datasets
            ]
    world.check(world.rank or same)


def saved(folder: Path, content: dict[str, Any]) -> Path:
    """What stock torch writes of ``content``."""
    torch_save(content, checkpoint_id=folder, no_dist=True)
    return folder


def test_what_an_import_would_mix_or_lose_is_refused_by_name(tmp_path: Path) -> None:
    values = {"w": torch.ones(4)}
    state = {"state": {"w": {"exp_avg": torch.ones(4), "step": torch.tensor(2.0)}}}
    group: dict[str, Any] = {"param_groups": [{"params": ["w"], "lr": 0.1}]}
    for name, content, said in (
        ("models", {"a": {"model": values}, "b": {"model": values}}, "several models"),
        ("both", {"model": values, "o": state | group, "p": state | group}, "o, p"),
        ("int", {"model": values, "o": {"state": {"w": {"step": 2}}} | group}, "no tensor"),
        ("twice", {"model": {**values, "_orig_mod.w": torch.zeros(4)}}, "name one weight"),
    ):
        folder = saved(tmp_path / name, content)
        with pytest.raises(CheckpointError, match=said):
            convert(folder, tmp_path / f"{name}-run")
    saved(tmp_path / "extra", {"model": {**values, "_extra_state": torch.ones(2)}})
    path = convert(tmp_path / "extra", tmp_path / "extra-run")
    assert [row.name for row in read_manifest(path).table.rows] == ["w"]


def test_chunks_that_are_not_what_the_metadata_say_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "theirs", {"model": {"w": torch.ones(4), "v": torch.ones(9)}})
    told = pickle.loads((folder / ".metadata").read_bytes())

    def refused(said: str, **change: Any) -> None:
        tensors = {**told.state_dict_metadata, "model.w": replace(whole, **change)}
        (folder / ".metadata").write_bytes(pickle.dumps(replace(told, state_dict_metadata=tensors)))
        with pytest.raises(CheckpointError, match=said):
            convert(folder, tmp_path / "run")

    whole = told.state_dict_metadata["model.w"]
    (chunk,) = whole.chunks
    refused("overlap or leave gaps", chunks=[chunk, chunk])
    larger = torch.Size([40])
    refused(r"is \(4,\)", size=larger, chunks=[replace(chunk, sizes=larger)])
    refused("torch.bfloat16", properties=replace(whole.properties, dtype=torch.bfloat16))
