"""The profile of some steps: traces that open, whose spans add up to the clocks of the step, and a page."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpczero.accelerator import HostAccelerator
from hpczero.comm.calls import Calls, Work
from hpczero.models.config import GPTConfig
from hpczero.models.gpt import GPT
from hpczero.options.config import LogOptions, RunConfig
from hpczero.run.evaluation import PlainPasses
from hpczero.run.profile import Profile
from hpczero.run.results.folder import RunFolder
from hpczero.run.results.metrics import StepMetrics, Stopwatch, read_metrics
from hpczero.run.step import Taken, TrainingStep
from hpczero.zero.backward_schedule import Residence
from hpczero.zero.units.unit import Unit
from tests.helpers.runs import losses, train
from tests.helpers.small_models import adamw
from tests.helpers.world import World

FIRST, LAST = 4, 5
PARTS = ("data", "forward", "backward", "optimizer", "communication")
UNITS = {"root", "blocks.0", "blocks.1"}
SEAMS = (
    (Stopwatch, "phase"),
    (Calls, "timed"),
    (Work, "wait"),
    (Unit, "unshard"),
    (Residence, "make_whole"),
)


def events(folder: Path, rank: int) -> list[dict[str, Any]]:
    path = folder / "profile" / f"steps-{FIRST}-{LAST}" / f"trace-rank{rank}.json.gz"
    with gzip.open(path, "rt") as file:
        return list(json.load(file)["traceEvents"])


def spans(found: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """Name, begin and end of what the run has named, in ms."""
    named = [e for e in found if e.get("cat") == "user_annotation" and e["ph"] == "X"]
    return [(e["name"], e["ts"] / 1e3, (e["ts"] + e["dur"]) / 1e3) for e in named]


def taken_from(
    named: list[tuple[str, float, float]], number: int
) -> tuple[float, dict[str, float]]:
    """Length of a step in the trace, and of its parts, in ms."""
    (step,) = [each for each in named if each[0] == f"step {number}"]
    inside = [each for each in named if step[1] <= each[1] and each[2] <= step[2]]
    return step[2] - step[1], {p: sum(b - a for name, a, b in inside if name == p) for p in PARTS}


def check_clocks(
    named: list[tuple[str, float, float]], clocks: dict[int, dict[str, float]], within: float
) -> None:
    """The parts of each step in the trace are the clocks of ``clocks``, and cover the step, but for a share of it.

    One of the steps is enough: another program may interrupt a rank between two clocks.
    """
    apart: dict[str, list[float]] = {}
    for number, expected in clocks.items():
        whole, ms = taken_from(named, number)
        assert sum(ms.values()) <= whole
        apart.setdefault("sum", []).append(1 - sum(ms.values()) / whole)
        for part, found in {**ms, "step": whole}.items():
            apart.setdefault(part, []).append(abs(found - expected.get(part, found)) / whole)
    assert all(min(found) < within for found in apart.values()), apart


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_profiled_steps_leave_a_trace_of_each_rank_and_a_page_whose_sums_agree(
    world: World,
) -> None:
    model = GPT(GPTConfig(vocab_size=64, context=128, layers=2, hidden=64, heads=2))
    model.initialize_all(seed=0)
    optimizer, accelerator = adamw(model), HostAccelerator()
    tokens = torch.randint(64, (4, 129), generator=torch.Generator().manual_seed(world.rank))
    before = [getattr(owner, name) for owner, name in SEAMS]
    taken: dict[int, Taken] = {}
    with world.zeroified(model, optimizer, stage=3) as sharding:
        loss = lambda model, x, y: model(x, y)  # noqa: E731
        passes = PlainPasses(model, loss=loss, accumulation=2, accelerator=accelerator)
        run: Any = SimpleNamespace(
            config=RunConfig(log=LogOptions(profile=f"{FIRST}:{LAST + 1}")),
            model=model,
            given=SimpleNamespace(accelerator=accelerator, topology=world.topology),
            folder=RunFolder(world.folder),
            records=object() if world.rank == 0 else None,
            planned_nbytes=2**30,
            step=TrainingStep(
                model,
                optimizer,
                passes=passes,
                samples=lambda number, micro: (tokens[:, :-1], tokens[:, 1:]),
                accelerator=accelerator,
            ),
        )
        profile = Profile(run)
        for number in range(1, 8):
            with profile.step(number):
                taken[number] = run.step.take(number - 1)
            wrapped = FIRST <= number <= LAST
            now = [getattr(owner, name) for owner, name in SEAMS]
            world.check(all((a is b) != wrapped for a, b in zip(now, before, strict=True)), number)
            profile.note(number, taken[number], last=number == 7)
        world.check([getattr(owner, name) for owner, name in SEAMS] == before)
        held = sum(sharding.memory.current.values()) + sharding.optimizer_nbytes()
    found = events(world.folder, world.rank)
    named = spans(found)
    clocks = {}
    for number in range(FIRST, LAST + 1):
        watch = taken[number].watch
        clocks[number] = {"step": taken[number].step_s * 1e3, **{p: watch.ms(p) for p in PARTS}}
    wrong = ""
    try:
        check_clocks(named, clocks, within=0.2)  # of steps of 30 ms
        check_names(found, named)
    except AssertionError as error:
        wrong = str(error)
    world.check(not wrong, wrong)
    world.on_root(check_page, world.folder, [c["step"] for c in clocks.values()], held)


def check_names(found: list[dict[str, Any]], named: list[tuple[str, float, float]]) -> None:
    names = [name for name, _, _ in named]
    for what in ("all_gather of", "reduce_scatter of"):
        assert {name.split("'")[1] for name in names if name.startswith(what)} == UNITS
    for what in ("wait for ", "unshard "):
        assert {n.removeprefix(what) for n in names if n.startswith(what)} >= UNITS
    parts = [(a, b) for name, a, b in named if name in ("forward", "backward")]
    used = [e for e in found if e.get("cat") == "unit"]
    assert {e["name"] for e in used} == {f"in use: {unit}" for unit in UNITS}
    for unit in UNITS:  # in forward and backward of two micro batches of each step
        mine = [e for e in used if e["id2"] == {"local": unit}]
        assert "".join(e["ph"] for e in mine) == "be" * 4 * (LAST + 1 - FIRST)
        for e in mine:
            assert any(a - 0.1 <= e["ts"] / 1e3 <= b + 0.1 for a, b in parts), e
    (process,) = {e["pid"] for e in used}
    called = [e for e in found if e["name"] == "process_name" and e["pid"] == process]
    assert [e["args"]["name"][:5] for e in called] == ["rank "], called
    held = [e["args"] for e in found if e["ph"] == "C"]
    assert len({sum(each.values()) for each in held}) > 1  # units come and go


def check_page(folder: Path, steps_ms: list[float], held_nbytes: int) -> None:
    page = folder / "profile" / f"steps-{FIRST}-{LAST}" / "profile.html"
    text = page.read_text()
    rows = re.findall(r"<tr><td>(\d)</td><td>[^<]+</td>(.*?)<td><a href=\"([^\"]+)\"", text)
    assert [rank for rank, _, _ in rows] == ["0", "1"]
    assert "the plan expects 1,024.0 MiB" in text
    for _, row, trace in rows:
        assert (page.parent / trace).is_file()
        numbers = [float(n.replace(",", "")) for n in re.findall(r"<td>([\d,.]+)", row)]
        step, *parts, checkpoint, memory = numbers
        assert sum(parts) == pytest.approx(step, abs=0.5)  # each rounded to a tenth
        assert checkpoint == 0
        assert memory >= held_nbytes / 2**20 - 0.1
    first = float(re.findall(r"<td>([\d,.]+)", rows[0][1])[0].replace(",", ""))
    assert first == pytest.approx(sum(steps_ms) / len(steps_ms), abs=0.1)


@pytest.mark.slow
def test_profile_of_a_run_says_what_its_metrics_say_and_changes_no_loss(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "train__steps": 6,
        "train__accumulation": 2,
        "checkpoint__every": LAST,
        "model__hidden": 128,
        "model__context": 64,
    }
    train(tmp_path, log__profile=f"{FIRST}:{LAST + 1}", **sizes).ended()
    measured: list[StepMetrics] = read_metrics(tmp_path / "r" / "metrics.jsonl")
    # Waits of the last part are in communication_ms, with those inside the others.
    clocks = {
        m.step: {part: getattr(m, f"{part}_ms") for part in ("step", *PARTS[:-1])}
        for m in measured[FIRST - 1 : LAST]
    }
    named = spans(events(tmp_path / "r", 0))
    check_clocks(named, clocks, within=0.02)
    assert [name for name, _, _ in named].count("checkpoint") == len(clocks)
    before = losses(tmp_path)
    train(tmp_path, run__overwrite="true", **sizes).ended()
    assert losses(tmp_path) == before
    assert not (tmp_path / "r" / "profile").exists()
