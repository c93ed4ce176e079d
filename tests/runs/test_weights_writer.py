"""The file of the final weights, written tensor by tensor, has the bytes that the safetensors library writes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import hpczero
from hpczero import Offload
from hpczero.checkpoint.foreign import safe_file
from hpczero.checkpoint.foreign.safe_file import DTYPES, WeightsWriter, tensor_digest, with_digests
from hpczero.data.tokenize import ByteTokenizer
from hpczero.errors import CheckpointError, TierError
from hpczero.run import loop
from hpczero.run.results.weights import Weights, write_weights
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import adamw, raises_on_all, tiny_gpt, tiny_tokens, zeroified

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

METADATA = {"z": "last", "a": 'first "quoted" \\ \u00e9 \u4e2d'}


def by_the_library(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    """``save_file``, with the metadata sorted, which the library writes in any order."""
    once = {id(tensors[name]): name for name in reversed(list(tensors))}
    held = {name: tensors[name] for name in once.values()}
    digests = {}
    for name, tensor in held.items():
        code = DTYPES[str(tensor.dtype).removeprefix("torch.")][0]
        flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        digests[name] = tensor_digest(code, tensor.shape, [flat])
    save_file(held, path, metadata=with_digests(metadata, digests))
    content = path.read_bytes()
    nbytes = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + nbytes])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    assert len(text) <= nbytes
    return content[:8] + text.ljust(nbytes) + content[8 + nbytes :]


def of_all_kinds() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    found: dict[str, Tensor] = {}
    for i, name in enumerate(DTYPES):
        bits = torch.randint(0, 2, (3 + i, 8), generator=draw, dtype=torch.uint8)
        kind = getattr(torch, name)
        found[f"{i % 3}.{name}"] = bits.view(kind) if kind is not torch.bool else bits.bool()
    found["tied"] = found["2.uint8"] if "2.uint8" in found else next(iter(found.values()))
    found["scalar"] = torch.tensor(3.5)
    found["empty"] = torch.empty(0, 4)
    found["a \u4e2d name"] = torch.randn(5, generator=draw)
    found["also tied"] = found["a \u4e2d name"]
    return found


def test_any_tensors_are_written_as_the_library_writes_them(tmp_path: Path) -> None:
    tensors = of_all_kinds()
    stand_ins: dict[int, Tensor] = {}
    shapes = {
        name: stand_ins.setdefault(id(t), torch.empty_like(t, device="meta"))
        for name, t in tensors.items()
    }
    values = {id(shapes[name]): tensor for name, tensor in tensors.items()}
    path = tmp_path / "model.safetensors"
    with WeightsWriter(path, shapes, METADATA) as writer:
        for stand_in in reversed(stand_ins.values()):
            writer.put([(stand_in, values[id(stand_in)])])
        writer.commit()
    expected = by_the_library(tmp_path / "library", tensors, METADATA)
    assert path.read_bytes() == expected
    (tmp_path / "library").unlink()
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def test_only_empty_tensors_are_a_file_too(tmp_path: Path) -> None:
    tensors = {"b": torch.empty(0), "a": torch.empty(2, 0)}
    with WeightsWriter(tmp_path / "ours", tensors, {}) as writer:
        writer.put((t, t) for t in tensors.values())
        writer.commit()
    assert (tmp_path / "ours").read_bytes() == by_the_library(tmp_path / "library", tensors, {})


def test_a_file_that_is_not_committed_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("old")
    tensors = {"a": torch.ones(3), "b": torch.ones(4)}
    with WeightsWriter(path, tensors, {}) as writer:
        writer.put([(tensors["a"], tensors["a"])])
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


# --- at the end of a run -------------------------------------------------------------------------------------------


def run_of(model: nn.Module, topology: Topology, path: Path) -> Any:
    """As much of a run as its last lines need."""
    config: Any = model.config
    return SimpleNamespace(
        model=model,
        given=SimpleNamespace(topology=topology),
        lock=SimpleNamespace(lock=SimpleNamespace(check=lambda: None)),
        folder=SimpleNamespace(weights=path),
        card=dataclasses.asdict(config),
        reading=SimpleNamespace(identity=lambda: {"tokenizer": ByteTokenizer().to_json()}),
    )


def trained(model: Any, state: hpczero.Sharding, rank: int) -> None:
    tokens = tiny_tokens(rank)
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    (optimizer,) = state.optimizers
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_final_weights_are_the_file_of_the_whole_model(
    comm: MPI.Intracomm, topology: Topology, folder: Path, where: str, precision: str
) -> None:
    offload = Offload("disk", "disk", "disk", folder, 2**14, buffers=4) if where == "disk" else None
    model = tiny_gpt()
    model.requires_grad_(True)
    next(iter(model.parameters())).requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    options = {"topology": topology, "stage": 3, "offload": offload, "precision": precision}
    with zeroified(model, optimizer, **options) as state:
        trained(model, state, comm.rank)
        loop._write_weights(run_of(model, topology, folder / "ours"), 7)
        whole = hpczero.full_state_dict(model)
    if whole is not None:
        write_weights(
            folder / "whole", whole, model=model.config, tokenizer=ByteTokenizer(), step=7
        )
        assert (folder / "ours").read_bytes() == (folder / "whole").read_bytes()
        card = dataclasses.asdict(model.config)
        told = {"model": card, "tokenizer": ByteTokenizer().to_json(), "step": 7}
        metadata = {"hpczero": json.dumps(told)}
        expected = by_the_library(folder / "library", whole, metadata)
        assert (folder / "ours").read_bytes() == expected
        assert Weights(folder / "ours").step == 7


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("what", ["the folder", "a tensor", "the end", "the tier"])
def test_what_fails_on_rank_0_fails_on_all_and_leaves_nothing(
    comm: MPI.Intracomm,
    topology: Topology,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    path = folder / ("gone" if what == "the folder" else ".") / "model.safetensors"
    offload = Offload("host", "host", "host", window=2**14, buffers=4)
    model = tiny_gpt()
    with zeroified(model, adamw(model), topology=topology, stage=3, offload=offload) as state:
        trained(model, state, comm.rank)
        kind: type[Exception] = CheckpointError
        with monkeypatch.context() as patch:
            if what == "a tensor":
                right, calls = WeightsWriter.put_tensor, []

                def put(self: Any, tensor: Tensor, values: Tensor) -> None:
                    calls.append(1)
                    if len(calls) > 5:
                        patch.setattr(safe_file, "write_at", broken)
                    right(self, tensor, values)

                patch.setattr(WeightsWriter, "put_tensor", put)
            elif what == "the end":
                patch.setattr("os.fsync", broken)
            elif what == "the tier":
                kind = TierError
                assert state.away.store is not None
                if comm.rank == comm.size - 1:
                    patch.setattr(state.away.store.tier, "_read", lost)
            said = "lost" if kind is TierError else r"cannot be written .*; check space"
            run = run_of(model, topology, path)
            raises_on_all(comm, kind, said, loop._write_weights, run, 7)
        comm.Barrier()
        names = [file.name for file in folder.iterdir()]
        parallel_assert(comm, not names, str(names))
        loop._write_weights(run_of(model, topology, folder / "model.safetensors"), 7)
    comm.Barrier()
    assert Weights(folder / "model.safetensors").step == 7


def broken(*_: object) -> Any:
    raise OSError(28, "No space left on device")


def lost(*_: object) -> None:
    raise TierError("lost")
