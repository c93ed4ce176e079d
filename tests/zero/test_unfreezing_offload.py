"""Layers that are unfrozen while others rest on a memory tier train as in plain torch, and stay in memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import hpczero
from hpczero import Offload
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import MLP, check_weights, mlp_input, same, values, zeroified

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]

SMALL: dict[str, Any] = {"window": 2**14, "buffers": 4}
WAYS: dict[str, dict[str, Any]] = {
    "states": {"optimizer": "host"},
    "gradients too": {"optimizer": "host", "gradients": "host"},
    "the host steps": {"optimizer": "host", "gradients": "host", "step": "host"},
    "all of a part": {"optimizer": "host", "gradients": "host", "fraction": 0.5},
    "disk": {"optimizer": "disk", "gradients": "disk"},
    "parameters": {"optimizer": "host", "gradients": "host", "parameters": "host"},
}


class Program:
    """A loop that unfreezes a layer after two steps."""

    def __init__(self) -> None:
        self.model = MLP()
        self.layer = self.model.layers[1].requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.trained(), lr=1e-2)

    def trained(self) -> list[torch.nn.Parameter]:
        """What trains now."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def before_step(self, number: int) -> None:
        """What the program does before a step."""
        if number == 2:
            self.layer.requires_grad_(True)
            self.optimizer.add_param_group({"params": list(self.layer.parameters()), "lr": 3e-3})
        if number in (4, 5):
            self.layer.requires_grad_(number == 5)

    def after_backward(self) -> None:
        """The rest of a step."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def step(program: Program, number: int, rank: int) -> None:
    program.before_step(number)
    program.model(mlp_input(rank)).square().mean().backward()
    program.after_backward()


def offload(way: str, folder: Path) -> Offload:
    on_disk: dict[str, Any] = {"folder": folder} if way == "disk" else {}
    return Offload(**WAYS[way], **SMALL, **on_disk)


@pytest.mark.parametrize(
    ("way", "stage"),
    [*((way, 3) for way in WAYS), *((way, 2) for way in WAYS if way != "parameters")],
)
def test_a_layer_unfrozen_beside_others_on_a_tier_trains_as_in_plain_torch(
    comm: MPI.Intracomm, topology: Topology, way: str, stage: int, tmp_path: Path
) -> None:
    plain, program = Program(), Program()
    options: dict[str, Any] = {"stage": stage, "offload": offload(way, tmp_path)}
    with zeroified(program.model, program.optimizer, topology=topology, **options) as sharding:
        for number in range(7):
            plain.before_step(number)
            losses = [plain.model(mlp_input(rank)).square().mean() for rank in range(comm.size)]
            torch.stack(losses).mean().backward()
            plain.after_backward()
            step(program, number, comm.rank)
        check_weights(comm, program.model, plain.model, within=2e-6)
        away = [unit.spec.name for unit in sharding.units if unit.away is not None]
        parallel_assert(comm, away and not any("unfrozen" in name for name in away), str(away))


@pytest.mark.parametrize("way", ["gradients too", "the host steps"])
def test_a_run_goes_on_from_a_checkpoint_of_after_the_change(
    comm: MPI.Intracomm, topology: Topology, way: str, tmp_path: Path
) -> None:
    folder = Path(comm.bcast(str(tmp_path)))
    found = []
    for resumed in (False, True):
        program = Program()
        options: dict[str, Any] = {"stage": 3, "offload": offload(way, tmp_path)}
        with zeroified(program.model, program.optimizer, topology=topology, **options) as sharding:
            if resumed:
                program.before_step(2)
                hpczero.checkpoint.load(folder / "saved", program.model, program.optimizer)
            for number in range(3 if resumed else 0, 7):
                step(program, number, comm.rank)
                if number == 2:
                    hpczero.checkpoint.save(
                        folder / "saved", program.model, program.optimizer, step=3
                    )
            found.append(values(sharding))
    parallel_assert(comm, same(*found))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_whose_gradients_are_clipped_has_the_norm_of_a_run_without_a_tier(
    comm: MPI.Intracomm, topology: Topology, precision: str, tmp_path: Path
) -> None:
    norms: list[Any] = []
    for way in ("", "gradients too"):
        program = Program()
        options: dict[str, Any] = {"stage": 3, "precision": precision}
        if way:
            options["offload"] = offload(way, tmp_path)
        with zeroified(program.model, program.optimizer, topology=topology, **options):
            norms.append([])
            for number in range(4):
                program.before_step(number)
                program.model(mlp_input(comm.rank)).square().mean().backward()
                norms[-1].append(float(hpczero.clip_grad_norm_(program.model, 0.05)))
                program.after_backward()
    parallel_assert(comm, norms[0] == pytest.approx(norms[1], rel=1e-6), f"{norms}")
