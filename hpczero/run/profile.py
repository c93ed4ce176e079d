"""Profile: where the time and the memory of some steps went, as a trace for each rank and one page for all.

Nothing here runs unless it is asked for (``--log.profile``): while it is, the seams below are wrapped from outside. The
page has the clocks of metrics.jsonl, so both say the same. The trace has torch's own operations too.
"""

from __future__ import annotations

import gzip
import html
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.autograd.profiler import profile, record_function

import hpczero
from hpczero.comm.calls import Calls, Work
from hpczero.files.regular import reason
from hpczero.job import log
from hpczero.run.results.metrics import StepSplit, Stopwatch
from hpczero.run.setup import Run
from hpczero.run.step import Taken
from hpczero.zero.backward_schedule import Residence
from hpczero.zero.units.unit import Unit

logger = logging.getLogger("hpczero.profile")

# Parts of a step on the page, by the fields of ``StepSplit`` without ``_ms``: colour, meaning.
PARTS = {
    "compute": ("#4878a8", "forward and backward, without waits for other ranks"),
    "communication": (
        "#d1605e",
        "exposed communication: time in collectives and in waits for them, in any part of the step",
    ),
    "optimizer": ("#6a9f58", "clipping and update, without waits"),
    "data": ("#e7a33e", "reading the batch"),
    "other": ("#999999", "the host: what none of the other clocks covers"),
    "checkpoint": ("#a87c9f", "saving after the step; not part of it"),
}
MIB = 2**20
POINTS = 2000  # of a drawn line of memory
WIDTH, HEIGHT = 900, 220  # of its picture


class Profile:
    """Of the steps ``log.profile`` of one run. Every rank makes one, or none does."""

    def __init__(self, run: Run) -> None:
        """Not collective. Nothing is wrapped yet."""
        self._run, self._steps = run, run.config.log.profiled
        self._sharding = hpczero.sharding(run.model)
        self._on_device = not run.given.accelerator.is_host
        self._active: ExitStack | None = None
        self._torch: Any = None
        self._splits: dict[int, StepSplit] = {}
        self._anchor: tuple[str, float] | None = None
        self._units: list[tuple[str, str, float]] = []  # b or e, name, time
        self._held: list[tuple[float, dict[str, int]]] = []
        self._open: set[str] = set()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Context around step ``number``, counted from 1 as in metrics.jsonl. Not collective."""
        if number not in self._steps:
            yield
            return
        if self._active is None:
            self._begin()
        name = f"step {number}"
        with self._span(name):
            self._anchor = self._anchor or (name, time.perf_counter())
            yield

    def note(self, number: int, taken: Taken, *, last: bool) -> None:
        """Note how long the parts of step ``number`` took, its save included. Collective after the last profiled step.

        ``last``: no step follows.
        """
        if self._active is None:
            return
        self._splits[number] = StepSplit.of(taken.watch, taken.step_s)
        if last or number + 1 not in self._steps:
            self._end()

    # --- what is wrapped meanwhile

    def _begin(self) -> None:
        self._active = stack = ExitStack()
        waits, self._run.step.waits = self._run.step.waits, self._on_device
        stack.callback(setattr, self._run.step, "waits", waits)
        self._wrap(Stopwatch, "phase", lambda _, name: name, context=True)
        self._wrap(Calls, "timed", lambda _, what: what or "wait for other ranks", context=True)
        self._wrap(Work, "wait", lambda work: f"wait for {work.name}")
        self._wrap(Unit, "unshard", lambda unit, **_: f"unshard {unit.spec.name}")
        self._after(Residence, "make_whole", lambda _, units: self._use(units, "b"))
        self._after(Residence, "give_back", lambda _, unit: self._use([unit], "e"))
        self._after(type(self._sharding.memory), "add", self._note_memory)
        if self._on_device:
            torch.cuda.memory._record_memory_history(max_entries=10**6)
        # The one below torch.profiler, whose start imports torch's compiler: a second, and 100 MB.
        self._torch = stack.enter_context(
            profile(use_device="cuda" if self._on_device else None, use_kineto=True)
        )

    @contextmanager
    def _span(self, name: str) -> Iterator[None]:
        with (
            torch.cuda.nvtx.range(name) if self._on_device else nullcontext(),
            record_function(name),
        ):
            yield

    def _wrap(
        self, owner: type, method: str, named: Callable[..., str], *, context: bool = False
    ) -> None:
        """Make each call of a method a span; ``context``: the method gives a context manager, which is the span."""
        original = getattr(owner, method)

        def call(*args: Any, **options: Any) -> Any:
            with self._span(named(*args, **options)):
                return original(*args, **options)

        @contextmanager
        def within(*args: Any, **options: Any) -> Iterator[Any]:
            with self._span(named(*args, **options)), original(*args, **options) as found:
                yield found

        self._replace(owner, method, within if context else call)

    def _after(self, owner: type, method: str, note: Callable[..., object]) -> None:
        original = getattr(owner, method)

        def call(*args: Any, **options: Any) -> Any:
            found = original(*args, **options)
            note(*args, **options)
            return found

        self._replace(owner, method, call)

    def _replace(self, owner: type, method: str, new: Callable[..., Any]) -> None:
        assert self._active is not None, "nothing is wrapped before the first profiled step"
        self._active.callback(setattr, owner, method, getattr(owner, method))
        setattr(owner, method, new)

    def _use(self, units: Sequence[Unit], kind: str) -> None:
        """Note that a module begins to use ``units`` (b), or no longer does (e)."""
        for name in (unit.spec.name for unit in units):
            if (kind == "b") != (name in self._open):
                (self._open.add if kind == "b" else self._open.discard)(name)
                self._units.append((kind, name, time.perf_counter()))

    def _note_memory(self, memory: object, *_: object) -> None:
        if memory is self._sharding.memory:
            self._held.append((time.perf_counter(), dict(self._sharding.memory.current)))

    # --- what is written

    def _end(self) -> None:
        assert self._active is not None, "a profiled step has begun"
        self._active.close()
        self._active, self._steps = None, range(0)
        first, last = min(self._splits), max(self._splits)
        folder = self._run.folder.profile / f"steps-{first}-{last}"
        world, written = self._run.given.topology.world, 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._write_trace(folder, world.rank)
            written = 1
        except (OSError, ValueError) as error:  # ValueError: torch has not written all of it
            logger.warning("%s: no trace of rank %d (%s)", folder, world.rank, error)
        splits = np.array([astuple(split) for split in self._splits.values()]).mean(axis=0)
        peak = max((sum(held.values()) for _, held in self._held), default=0)
        rows = world.share(np.array([*splits, peak + self._sharding.optimizer_nbytes(), written]))
        hosts = world.hosts()
        if self._run.records is None:
            return
        try:
            page = folder / "profile.html"
            page.write_text(self._page(rows, hosts, f"steps {first} to {last}"), encoding="utf-8")
            log.info("profile of steps %d to %d: %s", first, last, page)
        except OSError as error:
            logger.warning("%s: no page (%s)", folder, reason(error))

    def _write_trace(self, folder: Path, rank: int) -> None:
        """What torch has recorded, with the use of units and the ledger of memory, on one clock."""
        with tempfile.TemporaryDirectory(dir=folder) as aside:
            raw = Path(aside) / "trace.json"
            self._torch.export_chrome_trace(str(raw))
            trace = json.loads(raw.read_bytes())
        if self._on_device:
            kept = str(folder / f"memory-rank{rank}.pickle")
            torch.cuda.memory._dump_snapshot(kept)  # type: ignore[no-untyped-call]
            torch.cuda.memory._record_memory_history(enabled=None)
        events, (name, began) = trace["traceEvents"], self._anchor or ("", 0.0)
        zero = next(e["ts"] for e in events if e.get("name") == name and e.get("ph") == "X")
        here = {"pid": os.getpid(), "tid": threading.get_native_id()}

        def at(seconds: float) -> dict[str, Any]:
            return {"ts": zero + (seconds - began) * 1e6, **here}

        for event in events:
            if event.get("name") == "process_name" and event.get("pid") == here["pid"]:
                event["args"] = {"name": f"rank {rank}"}  # torch says python; the first name counts
        for kind, unit, when in self._units:
            # id2, not id: Perfetto shows what has an id beside all processes, or not at all.
            named = {"name": f"in use: {unit}", "cat": "unit", "id2": {"local": unit}}
            events.append({"ph": kind, **named, **at(when)})
        for when, held in self._held:
            mib = {category: nbytes / MIB for category, nbytes in held.items()}
            events.append({"ph": "C", "name": "memory held, MiB", "args": mib, **at(when)})
        with gzip.open(folder / f"trace-rank{rank}.json.gz", "wt", encoding="utf-8") as file:
            json.dump(trace, file)

    def _page(self, rows: Any, hosts: Sequence[str], steps: str) -> str:
        names = [field.name.removesuffix("_ms") for field in fields(StepSplit)]
        planned = self._run.planned_nbytes
        most = max(float(row[: len(names)].sum()) for row in rows)
        lines = []
        for rank, (row, host) in enumerate(zip(rows, hosts, strict=True)):
            ms = dict(zip(names, row, strict=False))
            bar = "".join(
                f'<i style="width:{100 * ms[part] / most:.2f}%;background:{colour}" title="{part} {ms[part]:.1f} ms">'
                "</i>"
                for part, (colour, _) in PARTS.items()
            )
            step = sum(ms[part] for part in PARTS if part != "checkpoint")
            figures = "".join(f"<td>{ms[part]:,.1f}</td>" for part in PARTS)
            trace = f'<a href="trace-rank{rank}.json.gz">trace</a>' if row[-1] else "not written"
            lines.append(
                f"<tr><td>{rank}</td><td>{html.escape(host)}</td><td>{step:,.1f}</td>{figures}"
                f"<td>{row[-2] / MIB:,.1f}</td><td>{trace}</td><td class=bar>{bar}</td></tr>"
            )
        head = "".join(
            f'<th style="color:{colour}">{part}</th>' for part, (colour, _) in PARTS.items()
        )
        said = "".join(f"<li><b>{part}</b>: {meaning}</li>" for part, (_, meaning) in PARTS.items())
        title = html.escape(f"{self._run.config.run.name}: {steps}")
        return f"""<!doctype html><meta charset="utf-8"><title>{title}</title>
<style>body {{ font: 14px sans-serif; margin: 2em }} td, th {{ padding: 2px 8px; text-align: right }}
.bar {{ width: 400px; text-align: left }} .bar i {{ display: inline-block; height: 14px }}</style>
<h1>{title}</h1>
<p>Milliseconds of one step of each rank, as a mean over these steps, by the clocks of metrics.jsonl. Ranks wait for one
another: the rank that communicates least is the one that the others wait for.</p>
<table><tr><th>rank</th><th>host</th><th>step</th>{head}<th>memory, MiB</th><th></th><th></th></tr>
{"".join(lines)}</table><ul>{said}</ul>
<h2>Memory of rank 0 against the plan</h2>
<p>Parameters, masters, gradients, optimizer state and buffers; the plan expects {planned / MIB:,.1f} MiB at most.
Activations and what torch keeps beside them are not in it.</p>
{self._drawn(planned)}
<p>A trace opens in <a href="https://ui.perfetto.dev">ui.perfetto.dev</a>.</p>
"""

    def _drawn(self, planned: int) -> str:
        """The memory of this rank over time, and the plan, as SVG."""
        optimizer = self._sharding.optimizer_nbytes()
        points = [(when, sum(held.values()) + optimizer) for when, held in self._held]
        if not points:
            return "<p>Nothing was taken or given back in these steps.</p>"
        begin, end = points[0][0], points[-1][0]
        most = 1.1 * max(planned, *(nbytes for _, nbytes in points))
        scale = WIDTH / max(end - begin, 1e-9)
        # Of many points that share a pixel, the highest is drawn.
        drawn: dict[int, tuple[float, float]] = {}
        for when, nbytes in points:
            x, y = (when - begin) * scale, HEIGHT - HEIGHT * nbytes / most
            place = int(x * POINTS / WIDTH)
            drawn[place] = min(drawn.get(place, (x, y)), (x, y), key=lambda point: point[1])
        line = " ".join(f"H{x:.1f} V{y:.1f}" for x, y in drawn.values())
        limit = HEIGHT - HEIGHT * planned / most
        return f"""<svg width="{WIDTH}" height="{HEIGHT}" style="border:1px solid #ccc">
<path d="M0 {HEIGHT} {line}" fill="none" stroke="{PARTS["compute"][0]}"/>
<line x1="0" x2="{WIDTH}" y1="{limit:.1f}" y2="{limit:.1f}" stroke="{PARTS["communication"][0]}" stroke-dasharray="6"/>
<text x="4" y="{limit - 4:.1f}">plan</text></svg><p>{(end - begin) * 1e3:,.1f} ms from left to right</p>"""
