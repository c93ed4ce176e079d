"""A checkpoint as a folder of torch.distributed.checkpoint (DCP): weights, and the optimizer's state and options.

Every rank writes files of its own with torch's FileSystemWriter, one chunk in memory at a time. A chunk is some rows of
a tensor. Rank 0 writes ``.metadata`` when all of them are on the disk, and then the folder gets its name.

Two layouts of keys, which ``dcp.py`` shows: of a program that saves what ``get_state_dict`` gives as {"model": ...,
"optim": ...}, and of torchtitan.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import _flatten_optim_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from typing_extensions import override

from hpczero.checkpoint.disk.format import MASTER, STATE, Row
from hpczero.checkpoint.disk.json_keys import unmarked
from hpczero.checkpoint.disk.stored import ELEMENTS, Stored
from hpczero.files.regular import Explained
from hpczero.job.team import Team

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CHUNK_NBYTES = 64 * 2**20  # of a tensor, in memory at a time; one row may be more

Read = Callable[[str, int, int, str, str], Tensor]  # (dataset, begin, end, dtype, parameter)


class _DcpWriter(FileSystemWriter):
    """Without the name and number that each save of torch has: the same state is the same ``.metadata``."""

    @override
    def storage_meta(self) -> None:
        return None


class DcpContent(DefaultSavePlanner):
    """What goes into a folder of DCP; a planner of torch, whose tensors are read when they are written.

    Attributes:
        num_tensors: that are written; a tied one comes under each of its names, as FSDP2 writes it.
        nbytes: of all tensors.
    """

    def __init__(
        self, stored: Stored, layout: str, dtype: str, buffers: Mapping[str, Tensor], read: Read
    ) -> None:
        """No values are read yet.

        Args:
            stored: the checkpoint.
            layout: ``dcp`` or ``torchtitan``.
            dtype: of the weights.
            buffers: with their values, by name.
            read: gives elements [begin, end) of a dataset, flat, in a dtype; the last text names the parameter.
        """
        super().__init__()
        self._read = read
        # Where a tensor without values has them: dataset, first element there, dtype, and parameter for messages.
        self._places: dict[int, tuple[str, int, str, str]] = {}
        manifest = stored.manifest
        table, optimizer = manifest.table, manifest.meta["optimizer"] or {}
        weights = {row.name: self._rows(MASTER, row, dtype) for row in table.owners}
        for row in table.rows:
            if row.tied_to is not None:
                weights[row.name] = weights[table.rows[row.tied_to].name]
        weights |= buffers
        state: dict[str, Any] = {"model": weights}
        if optimizer:
            state["optim"] = self._optimizer([r for r in table.owners if not r.frozen], optimizer)
        if layout == "torchtitan":
            optim = state.pop("optim", None)
            flat: Any = {"optimizer": _flatten_optim_state_dict(optim)} if optim else {}
            state = {**weights, **flat}
        self.set_up_planner(state, is_coordinator=True)
        items = self.create_local_plan().items
        tensors = [item.tensor_storage_size() or 0 for item in items if item.tensor_data]
        self.num_tensors, self.nbytes = len(tensors), sum(tensors)
        self._items = [chunk for item in items for chunk in self._cut(item)]

    def write_all(self, folder: Path, most_nbytes: int, told: Explained, team: Team) -> None:
        """Write everything to ``folder``, which is there and empty. Collective over the team.

        Args:
            folder: where the files go.
            most_nbytes: of a file, which may have a chunk more.
            told: what an error of the system becomes.
            team: ranks that share the work.

        Raises:
            ConfigError: the dtype cannot hold a weight.
            CorruptCheckpoint: a part of the checkpoint is damaged.
        """
        files = self._files(min(-(-self.nbytes // team.size), most_nbytes))
        plans, metadata = create_default_global_save_plan(files)
        writer = _DcpWriter(folder)
        plans = writer.prepare_global_plan(plans)
        mine: list[WriteResult] = []

        def steps() -> Iterator[None]:
            first, stop = (len(plans) * rank // team.size for rank in (team.rank, team.rank + 1))
            for plan in plans[first:stop]:
                with told:
                    mine.extend(writer.write_data(plan, self).wait())
                yield

        team.take_steps("write the folder", steps())
        results = team.all_gather_lists(mine)
        with team.agreed("end the folder"), told:
            if team.rank == 0:
                writer.finish(replace(metadata, planner_data=self.mappings), results)

    def _files(self, nbytes: int) -> list[SavePlan]:
        """What goes into each file."""
        found: list[list[WriteItem]] = [[]]
        filled = 0
        for item in self._items:
            if filled >= nbytes:
                found.append([])
                filled = 0
            found[-1].append(item)
            data = item.tensor_data
            filled += data.chunk.sizes.numel() * data.properties.dtype.itemsize if data else 0
        return [SavePlan(items) for items in found]

    @override
    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The values of an item. Raises CorruptCheckpoint, ConfigError."""
        place = self._places.get(id(self.state_dict[write_item.index.fqn]))
        if place is None or write_item.tensor_data is None:
            return super().resolve_data(write_item)
        (dataset, begin, dtype, name), chunk = place, write_item.tensor_data.chunk
        begin += chunk.offsets[0] * prod(chunk.sizes[1:]) if chunk.sizes else 0
        return self._read(dataset, begin, begin + chunk.sizes.numel(), dtype, name).view(
            chunk.sizes
        )

    def _rows(self, dataset: str, row: Row, dtype: str) -> Tensor:
        """A parameter's elements in ``dataset``, as a tensor without values."""
        found = torch.empty(row.shape, dtype=DTYPES[dtype], device="meta")
        self._places[id(found)] = dataset, row.offset, dtype, row.name
        return found

    def _optimizer(self, rows: list[Row], meta: dict[str, Any]) -> dict[str, Any]:
        """As torch.distributed.checkpoint.state_dict gives it."""
        states: dict[str, dict[str, Any]] = {}
        for key, kind in meta["kinds"].items():
            values = meta["present"][key]
            for row in (
                rows if "." not in key else ()
            ):  # averages of weights: no program else has them
                if not values.keys() & {"*", row.name}:
                    continue
                value = values.get(row.name, values.get("*"))
                if kind == ELEMENTS:
                    value = self._rows(STATE + key, row, "fp32")
                elif kind.startswith("tensor:"):
                    dtype = getattr(torch, kind.removeprefix("tensor:"))
                    value = torch.tensor(value, dtype=dtype, device="cpu")
                states.setdefault(row.name, {})[key] = value
        groups = [
            {name: _tuples(unmarked(value)) for name, value in group.items()}
            | {"params": [row.name for row in rows if row.group == place]}
            for place, group in enumerate(meta["groups"])
        ]
        return {"state": states, "param_groups": groups}

    def _cut(self, item: WriteItem) -> Iterator[WriteItem]:
        """An item as chunks of some rows each."""
        data = item.tensor_data
        if data is None or not data.size or id(self.state_dict[item.index.fqn]) not in self._places:
            yield item
            return
        length, *rest = data.size
        step = max(CHUNK_NBYTES // max(prod(rest) * data.properties.dtype.itemsize, 1), 1)
        for first in range(0, max(length, 1), step):
            offsets = torch.Size([first, *[0] * len(rest)])
            chunk = ChunkStorageMetadata(offsets, torch.Size([min(step, length - first), *rest]))
            yield replace(
                item,
                index=replace(item.index, offset=offsets),
                type=WriteItemType.SHARD,
                tensor_data=replace(data, chunk=chunk),
            )


def _tuples(value: Any) -> Any:
    """Options as an optimizer has them: what is a list in JSON was a tuple."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
