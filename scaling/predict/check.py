"""Prediction against measurement on this host: the same rounds, the same processes.

Owns: the order of a run and its rows. Must not know: the model's terms, the arithmetic of the report. All crews of a
workload stay resident; in each round every crew first probes the host with all its ranks, then trains a few steps, so
that what slows the machine down for a while slows both down.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Iterator, Sequence

from hpczero.predict.machine import MeasuredKernels
from scaling.contenders import find_entry
from scaling.contenders.ranks import Crew
from scaling.contenders.workload import WORKLOADS, Workload
from scaling.evidence.cpu import machine_seconds, process_seconds
from scaling.evidence.record import Row, circumstances, cores
from scaling.predict.host import predict_on_host

PROGRAM = "scaling.predict.probe"
TOLERANCE = 0.20
WARM_UP = 2


def measure(
    workloads: Sequence[str],
    ranks: Sequence[int],
    stages: Sequence[int],
    *,
    rounds: int,
    steps: int,
) -> Iterator[Row]:
    """All rows.

    Args:
        workloads: names.
        ranks: of a crew.
        stages: of ZeRO.
        rounds: of every crew.
        steps: of a turn.
    """
    yield {
        "kind": "run",
        **circumstances(),
        "rounds": rounds,
        "steps": steps,
        "tolerance": TOLERANCE,
    }
    order = random.Random(0)
    for name in workloads:
        workload = WORKLOADS[name]
        with contextlib.ExitStack() as stack:
            crews = {}
            for size in ranks:
                for stage in stages:
                    entry = find_entry(f"hpczero-{stage}", transport="auto")
                    crew = Crew(entry, workload, size=size, program=PROGRAM)
                    crews[size, stage] = stack.enter_context(crew)
                    crew.ask("build")
                    crew.ask("turn", steps=WARM_UP)
            for number in range(rounds):
                for size, stage in order.sample(list(crews), len(crews)):
                    crew = crews[size, stage]
                    row = take_turn(crew, workload, size, stage, steps)
                    yield {"kind": "turn", "workload": name, "round": number, **row}
                say(f"{name}: round {number + 1} of {rounds} done")


def take_turn(crew: Crew, workload: Workload, ranks: int, stage: int, steps: int) -> Row:
    """Probe, predict, train."""
    begin, own, busy = time.perf_counter(), process_seconds(crew.pids), machine_seconds()
    probes = [crew.ask("probe")]
    answers = crew.ask("turn", steps=steps)
    probes.append(crew.ask("probe"))
    own, busy = process_seconds(crew.pids) - own, machine_seconds() - busy
    window_s = time.perf_counter() - begin
    # Before and after the steps: what changed meanwhile counts half.
    measured = MeasuredKernels.of_ranks([rank for probe in probes for rank in probe])
    found = predict_on_host(
        workload.model, measured, ranks=ranks, stage=stage, micro_batch=workload.sequences
    )
    took = max(answer["seconds"] for answer in answers)
    return {
        "ranks": ranks,
        "stage": stage,
        "measured_s": took / steps,
        "predicted_s": found.step_s,
        "parts_s": {
            "forward": found.forward_s,
            "backward": found.backward_s,
            "communication": found.communication_s,
            "update": found.update_s,
        },
        "matmul_flops": dict(measured.products),
        "foreign_share": max(busy - own, 0.0) / (window_s * cores()),
    }


def probe_host(ranks: int) -> MeasuredKernels:
    """What so many ranks measure together, in a job of their own."""
    entry = find_entry("hpczero-0", transport="auto")
    with Crew(entry, WORKLOADS["tiny"], size=ranks, program=PROGRAM) as crew:
        crew.ask("build")  # the heap as in training
        crew.ask("turn", steps=1)
        return MeasuredKernels.of_ranks(crew.ask("probe"))


def say(line: str) -> None:
    """Progress, on stderr."""
    sys.stderr.write(f"predict: {line}\n")
    sys.stderr.flush()
