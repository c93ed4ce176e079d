"""Ranks that see different limits choose together; what fits one of them alone is no choice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpczero.accelerator import HostAccelerator
from hpczero.errors import ConfigError
from hpczero.job.topology import Topology
from hpczero.models.config import GPTConfig
from hpczero.options.config import OffloadOptions, RunConfig, RunOptions, TrainOptions
from hpczero.plan.peak import PlannedRun
from hpczero.plan.sizing import Batch
from hpczero.planner import choice
from hpczero.probe import job, tiers
from hpczero.run.results.folder import RunFolder
from hpczero.run.starting import choosing
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]

MODEL = GPTConfig(vocab_size=64, context=16, layers=2, hidden=32, heads=2)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here depends on how exact a probe is."""
    monkeypatch.setattr(job, "TURN_S", 0.001)
    monkeypatch.setattr(tiers, "SECONDS", 0.01)


def config_of(topology: Topology, folder: Path | None, **offload: Any) -> RunConfig:
    return RunConfig(
        train=TrainOptions(global_batch=4 * topology.size),
        offload=OffloadOptions(folder=None if folder is None else str(folder), **offload),
    )


def chosen(topology: Topology, folder: Path | None, **offload: Any) -> choosing.Chosen:
    config, batch = config_of(topology, folder, **offload), Batch(4 * topology.size, 4, 1)
    return choosing.choose_settings(config, MODEL, batch, topology, HostAccelerator())


def limited(monkeypatch: pytest.MonkeyPatch, fits: Callable[[PlannedRun], bool]) -> None:
    monkeypatch.setattr(choosing, "fitting_on", lambda run, topology, accelerator: fits)


def test_a_limit_of_one_rank_binds_all(
    topology: Topology, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = topology.rank == topology.size - 1
    limited(monkeypatch, lambda run: run.offload.parameters == "disk" or not last)
    found = chosen(topology, folder)
    assert found.config.offload.parameters == "disk"
    assert found.config.parallel.stage == 3
    assert found.batch.global_batch == 4 * topology.size
    assert found.config.train.micro_batch == found.batch.micro_batch
    said = topology.world.gather_text(str((found.config, found.batch, found.predicted)))
    assert len(set(said)) == 1


def test_a_part_of_the_units_and_inputs_elsewhere_are_applied_and_taken_over(
    topology: Topology, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = topology.rank == topology.size - 1
    most = 2 if last else 1  # units away that are enough for this rank

    def fits(run: PlannedRun) -> bool:
        away = len(run.offloaded.away)
        return run.checkpointing and run.kept.away and away >= most

    limited(monkeypatch, fits)
    monkeypatch.setattr(choice, "_saves", lambda run: True)  # whose inputs are a page
    found = chosen(topology, folder)
    offload = found.config.offload
    assert (offload.fraction < 1, found.config.activations.rest) == (True, "disk")
    assert found.predicted is not None
    assert len(found.predicted.run.offloaded.away) == 2
    config = dataclasses.replace(
        found.config, parallel=dataclasses.replace(found.config.parallel, auto=True)
    )
    run = RunFolder.of(RunOptions(name=str(topology.rank), folder=str(folder)))
    run.create(config)
    (run.checkpoints / "step-000000005").mkdir(parents=True)
    text = choosing.earlier_settings(RunConfig(), run)
    asked = config_of(topology, folder)
    again = choosing.taken_over(text, asked, MODEL, Batch(4 * topology.size, 4, 1), topology.size)
    assert again is not None
    assert (again.config.offload, again.config.activations) == (offload, found.config.activations)


def test_nothing_that_fits_is_one_error_on_all_ranks(
    world: World, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = topology.rank == topology.size - 1
    limited(monkeypatch, lambda run: not last)
    world.raises(ConfigError, "parallel.auto: none of", lambda: chosen(topology, None))


def test_a_folder_of_one_rank_that_cannot_be_used_leaves_the_disk_out(
    topology: Topology, folder: Path
) -> None:
    last = topology.rank == topology.size - 1
    found = chosen(topology, folder / "none" if last else folder)
    assert found.config.offload.optimizer == "device"


@pytest.mark.parametrize(
    ("medium", "why"), [("disk", "nowhere is no folder"), ("host", "compute there themselves")]
)
def test_a_tier_that_was_asked_for_and_cannot_be_measured_is_refused_with_the_reason(
    world: World, topology: Topology, folder: Path, medium: str, why: str
) -> None:
    said = f"parallel.auto: got offload on {medium}.*{why}"
    nowhere = folder / "nowhere"
    world.raises(ConfigError, said, lambda: chosen(topology, nowhere, optimizer=medium))
