"""Weights out of a checkpoint, for other programs: safetensors files, one torch file, or a folder of DCP.

One process does it, without MPI, or all ranks of a team: each reads and writes a range of the tensors.
Parameters are exported from their fp32 masters, in the dtype that is asked for. Persistent buffers keep their dtype.
torch is imported only where a torch file is written.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from hpczero.adapters import gpt2
from hpczero.checkpoint.disk.folder import checkpoints_at, in_one_unit, kind_at, misnamed
from hpczero.checkpoint.disk.format import BUFFERS, MASTER, Row
from hpczero.checkpoint.disk.json_keys import extra_of
from hpczero.checkpoint.disk.stored import Stored
from hpczero.checkpoint.foreign import safe_file as safefile
from hpczero.checkpoint.foreign.safe_file import DTYPES, TensorEntry
from hpczero.data.tokenize import as_library, from_json
from hpczero.errors import CheckpointNotWritten, ConfigError, CorruptCheckpoint
from hpczero.files.durable import Hidden
from hpczero.files.regular import WHY, Explained
from hpczero.job.team import Alone, Team

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("hpczero.checkpoint")

CHUNK_NUMEL = 2**20  # cast or transposed at a time
TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# The least fp32 magnitude that rounds to infinity.
OVERFLOW = {"fp32": np.inf, "bf16": float.fromhex("0x1.ffp127"), "fp16": 65520.0}

Array = npt.NDArray[Any]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class WeightsForm:
    """What exported weights look like.

    Attributes:
        format: ``safetensors`` makes a folder of files and an index, with one tensor in memory at a time. ``torch``
            makes one file for ``torch.load``, with the whole model in memory.
        dtype: dtype of the parameters; buffers keep their own.
        layout: names and shapes of ``hpczero``; or those of Hugging Face's ``gpt2``, with a config.json; or
            ``transformers``: of its GPT-2 where positions are learned, and of its GPT-NeoX where they are rotary. With
            the optimizer's state, as a folder of torch.distributed.checkpoint: ``dcp`` for programs of FSDP2 that save
            {"model": ..., "optim": ...}, ``torchtitan`` for torchtitan.
        shard_mib: most MiB of one safetensors file; a larger tensor has a file of its own.
        heads: attention heads, for a layout of transformers where the checkpoint does not say.
    """

    format: Literal["safetensors", "torch"] = "safetensors"
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    layout: Literal["hpczero", "gpt2", "transformers", "dcp", "torchtitan"] = "hpczero"
    shard_mib: int = 5120
    heads: int | None = None

    def __post_init__(self) -> None:
        if self.shard_mib < 1:
            raise ConfigError(f"shard_mib: got {self.shard_mib}, expected at least 1")
        if self.layout != "hpczero" and self.format != "safetensors":
            raise ConfigError(
                f"the layout {self.layout} is a folder of {'DCP' if self.of_dcp else 'safetensors'}; leave --format out"
            )
        if not self.of_transformers and self.heads is not None:
            raise ConfigError(
                "heads belong to a layout of transformers; leave --heads out, or give --layout transformers"
            )

    @property
    def of_transformers(self) -> bool:
        """Whether names and shapes are of a model of transformers."""
        return self.layout in ("gpt2", "transformers")

    @property
    def of_dcp(self) -> bool:
        """Whether it is a folder of torch.distributed.checkpoint."""
        return self.layout in ("dcp", "torchtitan")


@dataclass(frozen=True)
class Exported:
    """What was exported.

    Attributes:
        checkpoint: folder that was read.
        step: optimizer steps done.
        num_tensors: number of tensors, each tied one once.
        nbytes: bytes of the tensors.
    """

    checkpoint: Path
    step: int
    num_tensors: int
    nbytes: int


def export(
    path: Path, out: Path, form: WeightsForm | None = None, *, team: Team | None = None
) -> Exported:
    """Write the weights of a checkpoint to ``out``. Collective over ``team``.

    Args:
        path: a checkpoint, or the folder of checkpoints or of a run, of which the newest sound one is read.
        out: folder of safetensors files, or torch file; it must not exist yet.
        form: what the weights shall look like.
        team: the ranks that read and write, which give the same arguments; None: this process.

    Raises:
        ConfigError: there is no checkpoint, ``out`` exists, or the checkpoint does not fit ``form``.
        CorruptCheckpoint: none is sound; the message says what is wrong with the newest.
        CheckpointMismatch: a later version wrote it.
        CheckpointNotWritten: ``out`` cannot be written.
    """
    form, out, team = form or WeightsForm(), out.resolve(), team or Alone()
    found: list[str] = []
    with team.agreed("look for the checkpoint"):
        if form.format == "torch" and team.size > 1:
            raise ConfigError(
                "--format torch: one process writes the file; leave mpirun or srun out"
            )
        if team.rank == 0:
            found = [str(each) for each in checkpoints_at(path)]
            there = kind_at(out)
            empty = there == "a directory" and form.format != "torch" and not any(out.iterdir())
            if there and not empty:
                raise ConfigError(f"{out}: is there already; give another name, or take it away")
    candidates = [Path(each) for each in team.all_gather_lists(found)[0]]
    return of_newest(path, candidates, lambda stored: _write(stored, out, form, team), team)


def of_newest(
    path: Path,
    candidates: Sequence[Path],
    use: Callable[[Stored], T],
    team: Team | None = None,
) -> T:
    """What ``use`` makes of the newest sound checkpoint of ``candidates``, newest first. Collective over ``team``.

    ``use`` raises CorruptCheckpoint where a checkpoint is not sound, on every rank, and leaves nothing then.

    Raises:
        CorruptCheckpoint: none is sound; the message says what is wrong with the newest.
    """
    team, failed = team or Alone(), list[str]()
    for candidate in candidates:
        try:
            with ExitStack() as stack:
                with team.agreed("read the checkpoint"):
                    stored = stack.enter_context(Stored(candidate))
                    wrong = misnamed(candidate, stored.manifest)
                    if wrong and candidate != path:
                        raise CorruptCheckpoint(wrong)
                found = use(stored)
        except CorruptCheckpoint as error:
            if team.rank == 0:
                logger.warning("%s", error)
            failed.append(str(error))
            continue
        if failed and team.rank == 0:
            logger.warning("exported the older %s", candidate)
        return found
    older = f"; {len(failed) - 1} older ones are not sound either" if failed[1:] else ""
    with team.agreed("find a sound checkpoint"):
        raise CorruptCheckpoint(f"{failed[0]}{older}. Restore one from a copy")


def _write(stored: Stored, out: Path, form: WeightsForm, team: Team) -> Exported:
    with team.agreed("name the weights"):
        names = _Names(stored, form)
        entries = dict([*_parameters(stored, form, names), *buffers_of(stored)])
        if form.of_dcp:
            from hpczero.checkpoint.foreign.dcp_writing import (
                DcpContent,
            )  # not at the top: as torch

            buffers = {name: whole_tensor(entry) for name, entry in buffers_of(stored)}
            read = partial(_flat, stored)
            dcp = DcpContent(stored, form.layout, form.dtype, buffers, read)
    nbytes = dcp.nbytes if form.of_dcp else sum(entry.nbytes for entry in entries.values())
    text = f"{out}: cannot be written ({WHY}); check the path, space and permissions"
    told = Explained(CheckpointNotWritten, text)
    hidden = Hidden(out)
    with ExitStack() as stack:
        with team.agreed("begin the weights"), told:
            if team.rank == 0:
                stack.enter_context(hidden)
                _check_room(out.parent, nbytes)
                if form.format == "torch":
                    _write_torch(hidden.path, entries, names.tied)
                else:
                    hidden.path.mkdir()
                    if names.config is not None:
                        names.write_config(hidden.path)
        if form.format == "safetensors":  # a folder
            place = Path(team.all_gather_lists([str(hidden.path)])[0][0])
            if form.of_dcp:
                dcp.write_all(place, form.shard_mib * 2**20, told, team)
            else:
                safefile.write_all(place, entries, names.metadata(), form.shard_mib * 2**20, team)
        with team.agreed("name the weights"), told:
            if team.rank == 0:
                hidden.commit()
    if team.rank == 0 and (left_out := stored.manifest.meta.get("extra_states")):
        logger.warning(
            "%s: left out what get_extra_state() of %s gave; only a load of the checkpoint has it",
            out,
            ", ".join(left_out),
        )
    count = dcp.num_tensors if form.of_dcp else len(entries)
    return Exported(stored.path, stored.manifest.step, count, nbytes)


def _check_room(folder: Path, nbytes: int) -> None:
    system = os.statvfs(folder)
    free = system.f_bavail * system.f_frsize
    if free < nbytes:
        there, wanted = in_one_unit(free, nbytes)
        raise CheckpointNotWritten(
            f"{folder}: {there} are free and the weights need {wanted}; free some, export to another folder, or with "
            "--dtype bf16"
        )


class _Names:
    """Names of the tensors, further names of tied parameters, and what is said beside the values."""

    def __init__(self, stored: Stored, form: WeightsForm) -> None:
        """Raises ConfigError where the checkpoint does not fit the layout."""
        manifest = stored.manifest
        self._manifest, self._layout = manifest, form.layout
        rows = manifest.table.rows
        self.tied = {row.name: rows[row.tied_to].name for row in rows if row.tied_to is not None}
        extra = extra_of(manifest.meta)
        model, self._tokenizer = extra.get("model"), extra.get("tokenizer")
        self._model: dict[str, Any] = model if isinstance(model, dict) else {}
        self.config: dict[str, Any] | None = None
        self.rotary = form.layout == "transformers" and self._model.get("positions") == "rotary"
        self.heads = 0
        if form.of_transformers:
            shapes = {row.name: row.shape for row in rows}
            buffers = {name: tuple(shape) for name, _, shape in manifest.meta["buffers"]}
            try:
                tied = bool(self.tied)
                gpt2.check(shapes | buffers, self.tied, self._model, rotary=self.rotary)
                if self.rotary:
                    hidden = shapes[gpt2.TABLE][1]
                    heads = self.heads = gpt2.heads_of(hidden, self._model, form.heads)
                    self.config = gpt2.neox_config(shapes, self._model, heads=heads, tied=tied)
                else:
                    self.config = gpt2.their_config(
                        shapes, self._model, heads=form.heads, tied=tied
                    )
            except ConfigError as error:
                raise ConfigError(f"{stored.path}: {error}") from error
            self.config["dtype"] = TORCH_NAMES[form.dtype]

    def write_config(self, folder: Path) -> None:
        """Write ``config.json`` and the run's tokenizer, as far as it is known, for ``from_pretrained``."""
        config = dict(self.config or {})
        tokenizer = from_json(self._tokenizer) if isinstance(self._tokenizer, str) else None
        found = as_library(tokenizer) if tokenizer is not None else None
        if found is not None:
            library, end = found
            said = {"tokenizer_class": "PreTrainedTokenizerFast"}
            token = None if end is None else library.id_to_token(end)
            if token is not None:
                config["eos_token_id"], said["eos_token"] = end, token
            safefile.write_json(folder / "tokenizer.json", json.loads(library.to_str()))
            safefile.write_json(folder / "tokenizer_config.json", said)
        safefile.write_json(folder / "config.json", config)

    def metadata(self) -> dict[str, str]:
        """Metadata of the safetensors files. Our own import finds tokenizer, ties and buffers in them."""
        said: dict[str, Any] = {"step": self._manifest.step, "model": self._model}
        if self._layout == "hpczero":
            if isinstance(self._tokenizer, str):
                said["tokenizer"] = self._tokenizer
            said["tied"] = self.tied
            said["buffers"] = [name for name, _, _ in self._manifest.meta["buffers"]]
        return {"format": "pt", safefile.KEY: json.dumps(said)}


# --- tensors -------------------------------------------------------------------------------------------------------


Named = tuple[str, TensorEntry]


def _parameters(stored: Stored, form: WeightsForm, names: _Names) -> Iterator[Named]:
    dtype = TORCH_NAMES[form.dtype]
    for row in stored.manifest.table.owners:
        name, shape = row.name, row.shape
        pieces = partial(_cast_row, stored, row, form.dtype)
        if names.rotary:
            name = gpt2.neox_name(row.name)
            groups = gpt2.grouped(row.name, shape, names.heads)
            if groups is not None:
                pieces = partial(_turned, pieces, groups)
        elif form.of_transformers:
            name = gpt2.their_name(row.name)
            if gpt2.is_transposed(row.name):
                pieces = partial(_turned, pieces, shape)
                shape = shape[::-1]
        yield name, TensorEntry(dtype, shape, pieces)


def buffers_of(stored: Stored) -> Iterator[Named]:
    """Persistent buffers. One that modules share comes once; the checkpoint does not keep its further names."""
    begin = 0
    for name, dtype, shape in stored.manifest.meta["buffers"]:
        if dtype not in DTYPES:
            raise ConfigError(
                f"{stored.path}: buffer {name!r} is {dtype}, expected one of {', '.join(DTYPES)}; such a model "
                "cannot be exported"
            )
        end = begin + prod(shape) * DTYPES[dtype][1]
        yield name, TensorEntry(dtype, tuple(shape), partial(stored.read, BUFFERS, begin, end))
        begin = end


def _cast_row(stored: Stored, row: Row, dtype: str) -> Iterator[Array]:
    return _cast_range(stored, MASTER, row.offset, row.offset + row.numel, dtype, row.name)


def _cast_range(
    stored: Stored, dataset: str, start: int, stop: int, dtype: str, name: str
) -> Iterator[Array]:
    for slab in stored.read(dataset, start, stop):
        for begin in range(0, len(slab), CHUNK_NUMEL):
            yield cast(slab[begin : begin + CHUNK_NUMEL], dtype, name)


def _flat(
    stored: Stored, dataset: str, start: int, stop: int, dtype: str, name: str
) -> torch.Tensor:
    pieces = partial(_cast_range, stored, dataset, start, stop, dtype, name)
    return whole_tensor(TensorEntry(TORCH_NAMES[dtype], (stop - start,), pieces))


def cast(values: Array, dtype: str, name: str) -> Array:
    """Round (n,) fp32 values to the nearest of ``dtype``, ties to even; bf16 are returned as their bits.

    Raises:
        ConfigError: a finite value would become infinite; the message has the parameter's name.
    """
    if dtype == "fp32":
        return values
    largest = np.abs(values[np.isfinite(values)]).max(initial=0.0)
    if largest >= OVERFLOW[dtype]:
        raise ConfigError(
            f"{name}: holds values as large as {largest:.4g}, which {dtype} cannot; export as fp32"
            + (" or bf16" if dtype == "fp16" and largest < OVERFLOW["bf16"] else "")
        )
    if dtype == "fp16":
        return values.astype("<f2")
    bits = values.view("<u4")
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    found = rounded.astype("<u2")
    found[np.isnan(values)] = 0x7FC0
    return found


def _turned(pieces: Any, shape: tuple[int, ...]) -> Iterator[Array]:
    """A tensor of ``shape`` whose first two dimensions change places. It is in memory whole, in its final dtype."""
    whole: Array | None = None
    begin = 0
    for piece in pieces():
        if whole is None:
            whole = np.empty(prod(shape), dtype=piece.dtype)
        whole[begin : begin + len(piece)] = piece
        begin += len(piece)
    if whole is None:
        return
    tensor = whole.reshape(shape)
    step = max(CHUNK_NUMEL * shape[1] // whole.size, 1)
    for begin in range(0, shape[1], step):
        yield np.ascontiguousarray(tensor[:, begin : begin + step].swapaxes(0, 1)).reshape(-1)


# --- one torch file ------------------------------------------------------------------------------------------------


def _write_torch(path: Path, entries: dict[str, TensorEntry], tied: dict[str, str]) -> None:
    """Write a plain dictionary of tensors, as ``state_dict`` makes it.

    Every name is there; tied ones have the same tensor.
    """
    import torch  # not at the top: the other exports do without

    state = {name: whole_tensor(entry) for name, entry in entries.items()}
    state |= {alias: state[name] for alias, name in tied.items()}
    with path.open("xb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def whole_tensor(entry: TensorEntry) -> torch.Tensor:
    """All elements of ``entry``, on the host."""
    import torch

    dtype = getattr(torch, entry.dtype)
    data = np.empty(entry.nbytes, dtype=np.uint8)
    begin = 0
    for piece in entry.pieces():
        data[begin : begin + piece.nbytes] = piece.view(np.uint8)
        begin += piece.nbytes
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=dtype, device="cpu")
    return torch.from_numpy(data).view(dtype).view(entry.shape)
