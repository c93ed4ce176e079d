"""A whole model and its parts, cut by hand for any degrees; what they hold is known without any checkpoint.

Every part computes a sum of its parameters times numbers that are known, so that gradients are the same for all
layouts. Must not know: what any test looks for.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import torch
from torch import Tensor, nn

import hpczero
from hpczero.checkpoint.disk.folder import read_manifest
from hpczero.job.mesh import Mesh
from hpczero.plan.placement import KEY, ModelPart, Placement
from tests.checkpoint import programs

if TYPE_CHECKING:
    from mpi4py import MPI

LAYERS = 4
FROZEN = "first.frozen"


def whole_shapes() -> dict[str, tuple[tuple[int, ...], dict[str, Any]]]:
    """Shape and cut of every parameter of the whole model, in its order."""
    found: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
        "first.table": ((13, 6), {"dim": 0}),
        FROZEN: ((3, 5, 2), {"dim": 1}),
        "first.nothing": ((0, 4), {}),
        "first.wide": ((211, 38), {"dim": 1, "strips": 2}),
    }
    for layer in range(LAYERS):
        at = f"blocks.{layer}."
        found |= {
            f"{at}norm": ((6,), {}),
            f"{at}qkv": ((18, 7), {"dim": 0, "strips": 3, "grain": 2}),
            f"{at}bias": ((18,), {"dim": 0, "strips": 3, "grain": 2}),
            f"{at}projection": ((5, 9), {"dim": 1}),
            f"{at}after": ((5,), {}),
        }
    return found | {"last.scale": ((11,), {})}


TIED = {"last.head": "first.table"}


def numbers(name: str, what: str) -> Tensor:
    """Of the whole parameter ``name``, (shape,); the same everywhere."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {what}".encode()))
    return torch.randn(whole_shapes()[name][0], generator=generator)


def initialize(name: str, tensor: Tensor) -> None:
    """The first values."""
    tensor.copy_(numbers(name, "values"))


class Layer(nn.Module):
    """Parameters of this rank, by the last part of their names."""

    def __init__(self, placements: Mapping[str, Placement]) -> None:
        super().__init__()
        self.placements = dict(placements)
        for name, placement in placements.items():
            shape = placement.local_shape
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device="meta")))

    def forward(self, step: int) -> Tensor:
        """Whose gradients are ``numbers``."""
        total = torch.zeros(())
        for name, placement in self.placements.items():
            local = torch.empty(placement.local_shape)
            placement.take(numbers(placement.name, f"gradient {step}"), local)
            total = total + (getattr(self, name) * local).sum()
        return total


class Part(nn.Module):
    """What one rank has of the whole model."""

    def __init__(self, mesh: Mesh, rank: int, *, in_turn: bool = False) -> None:
        super().__init__()
        pipeline, _, _, _, tensor = mesh.coordinates(rank)
        first, last = pipeline == 0, pipeline == mesh.pipeline - 1
        self.placed: dict[str, Placement] = {}
        for name, (shape, cut) in whole_shapes().items():
            layer = int(name.split(".")[1]) if name.startswith("blocks.") else None
            stage = 0 if layer is None else layer * mesh.pipeline // LAYERS
            if in_turn and layer is not None:
                stage = layer % mesh.pipeline
            stage = mesh.pipeline - 1 if name.startswith("last.") else stage
            if stage == pipeline:
                self.placed[name] = placement_of(name, shape, cut, mesh.tensor, tensor)
        if last and not first:
            for alias, name in TIED.items():
                table = placement_of(name, *whole_shapes()[name], mesh.tensor, tensor)
                self.placed[alias] = replace(table, tied=True, counted=False)
        if first and not last:
            self.placed["first.table"] = replace(self.placed["first.table"], tied=True)
        if first:
            self.first = self._layer("first.")
            self.first.register_buffer("seen", torch.arange(3) + 7)
        self.blocks = nn.ModuleDict()
        for layer in range(LAYERS):
            if f"blocks.{layer}.qkv" in self.placed:
                block = self.blocks[str(layer)] = self._layer(f"blocks.{layer}.")
                block.register_buffer("mean", torch.full((layer + 1,), 0.5 + layer))
        if last:
            self.last = self._layer("last.")
            if first:
                self.last.head = self.first.table
        self.__dict__[KEY] = ModelPart(tuple(whole_shapes()), dict(TIED), self.placed, first, last)
        for name, parameter in self.named_parameters():
            if name == FROZEN:
                parameter.requires_grad_(False)

    def _layer(self, prefix: str) -> Layer:
        found = {n.removeprefix(prefix): p for n, p in self.placed.items() if n.startswith(prefix)}
        return Layer(found)

    def forward(self, step: int) -> Tensor:
        total = torch.zeros(())
        for name in ("first", "last"):
            if hasattr(self, name):
                total = total + getattr(self, name)(step)
        for block in self.blocks.values():
            total = total + block(step)
        return total


def rule(model: nn.Module) -> list[tuple[str, ...]]:
    """A unit for each block, and one for the rest."""
    return [(name,) for name, _ in model.named_modules() if name.startswith("blocks.")]


def placement_of(
    name: str, shape: tuple[int, ...], cut: Mapping[str, Any], parts: int, part: int
) -> Placement:
    """That of one parameter on one of ``parts`` tensor ranks."""
    if not cut or parts == 1:
        return Placement(name, shape, counted=part == 0)
    return Placement(name, shape, **cut, part=part, parts=parts)


class Program:
    """A part of the model in training."""

    def __init__(
        self,
        topology: hpczero.Topology,
        *,
        made_by: int | None = None,
        swapped: bool = False,
        in_turn: bool = False,
        **options: Any,
    ) -> None:
        """One that trains.

        Args:
            topology: the ranks.
            made_by: all values, of a model that is not on "meta".
            swapped: groups of the optimizer in the other order.
            in_turn: stages have every so manieth layer.
            options: of ``zeroify``.
        """
        self.topology = topology
        self.model = Part(topology.mesh, topology.rank, in_turn=in_turn)
        if made_by is not None:
            frozen = {n for n, p in self.model.named_parameters() if not p.requires_grad}
            self.model.to_empty(device="cpu")
            if topology.mesh.pipeline == 1:
                self.model.last.head = self.model.first.table
            for name, parameter in self.model.named_parameters():
                nn.init.constant_(parameter, made_by)
                parameter.requires_grad_(name not in frozen)
        groups = programs.two_groups(self.model.parameters())
        self.optimizer = torch.optim.AdamW(groups[:: -1 if swapped else 1], lr=1e-2, foreach=False)
        options = {"initialize": initialize, "rule": rule, **options}
        hpczero.zeroify(self.model, self.optimizer, topology=topology, **options)
        self.step = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.model(self.step).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1

    def close(self) -> None:
        hpczero.release(self.model)


def first_ranks(
    comm: MPI.Intracomm, degrees: Mapping[str, int]
) -> AbstractContextManager[hpczero.Topology | None]:
    """A topology of as many ranks as ``degrees`` need; None on the others, which wait at the end. Collective."""
    mesh = Mesh(**degrees)
    return programs.first_ranks(comm, mesh.size, mesh)


def program_of(
    comm: MPI.Intracomm, degrees: Mapping[str, int], **options: Any
) -> AbstractContextManager[Any]:
    """A ``Program`` on as many ranks as ``degrees`` need; None on the others, which wait at the end. Collective."""
    mesh = Mesh(**degrees)
    return programs.program_of(comm, mesh.size, Program, mesh, **options)


def trained_by_torch(steps: int) -> dict[str, dict[str, Tensor]]:
    """Values and moments of every whole parameter after so many steps of plain torch, by name."""
    shapes = whole_shapes()
    parameters = {name: nn.Parameter(numbers(name, "values")) for name in shapes}
    parameters[FROZEN].requires_grad_(False)
    groups = programs.two_groups(parameters.values())
    optimizer = torch.optim.AdamW(groups, lr=1e-2, foreach=False)
    for step in range(steps):
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                parameter.grad = numbers(name, f"gradient {step}")
        optimizer.step()
    found = {}
    for name, parameter in parameters.items():
        found[name] = {"values": parameter.detach()}
        for key in ("exp_avg", "exp_avg_sq") if parameter.requires_grad else ():
            nothing = torch.zeros(shapes[name][0])
            found[name][key] = optimizer.state[parameter].get(key, nothing)
    return found


def part_of(program: Program, name: str, whole: dict[str, dict[str, Tensor]], key: str) -> Tensor:
    """What this rank holds of the parameter ``name`` of its model, cut from ``whole``."""
    placement = program.model.placed[name]
    local = torch.full(placement.local_shape, 9.0)
    placement.take(whole[placement.name][key], local)
    return local


def contents(path: Path) -> dict[str, bytes]:
    """Every dataset but the random streams, which are each rank's own."""
    found: dict[str, bytes] = {}

    def look(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and name != "rng":
            found[name] = item[()].tobytes()

    with h5py.File(path / "state.h5") as file:
        file.visititems(look)
    return found


def described(path: Path) -> tuple[Any, ...]:
    """What a manifest says of the model and its optimizer."""
    manifest = read_manifest(path)
    said = ("optimizer", "buffers", "skipped_steps")
    return manifest.table, *(manifest.meta[name] for name in said)
