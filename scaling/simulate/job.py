"""A job on a described machine, simulated: recorded, matched, replayed, and put beside the forecast.

Owns: the order, and what a row says. Must not know: options, the report, how any of the parts works.
"""

from __future__ import annotations

import resource
import time
from dataclasses import replace
from typing import Any

from hpczero.predict.job import Job
from hpczero.predict.machine import Machine
from hpczero.predict.model import predict
from scaling.evidence.record import Row
from scaling.simulate.engine import Subject, record
from scaling.simulate.links import Network
from scaling.simulate.matching import check
from scaling.simulate.outcome import COMPUTE, WAITS, Outcome
from scaling.simulate.programs import Program, expanded
from scaling.simulate.replay import replay


def simulated(
    subject: Subject, network: Network, *, every_rank: bool = False
) -> tuple[Outcome, list[Program], Row]:
    """One step of a job.

    Args:
        subject: what is trained.
        network: what it runs on.
        every_rank: record every rank, and not one of each kind.

    Returns:
        What the replay says; the programs; how many ranks were recorded, and what the plan says that rank 0 sends.

    Raises:
        OrderError: ranks would not meet.
    """
    planned: list[tuple[int, int]] = []

    def one(rank: int) -> tuple[Program, Any]:
        found = record(subject, rank)
        planned.append(found.planned)
        return found.program, found.origins

    programs = expanded(one, subject.places, every_rank=every_rank)
    check(programs)
    outcome = replay(programs, subject.places, network)
    nbytes, messages = planned[0]
    facts = {"recorded": len(planned), "planned_nbytes": nbytes, "planned_messages": messages}
    return outcome, programs, facts


def row_of(subject: Subject, machine: Machine, *, message_s: float, every_rank: bool) -> Row:
    """A row of the report."""
    spread, begin = subject.spread, time.perf_counter()
    described = replace(machine, ranks_per_node=spread.ranks_per_node)
    network = Network.of(described, message_s=message_s)
    outcome, programs, facts = simulated(subject, network, every_rank=every_rank)
    forecast = predict(Job.of(spread, described))
    computing = forecast.forward_s + forecast.backward_s + forecast.update_s
    return {
        "layout": spread.as_json(),
        "ranks": spread.mesh.size,
        "ranks_per_node": spread.ranks_per_node,
        "stage": spread.stage,
        **facts,
        "calls": sum(1 for _ in programs[0].calls),
        "step_s": outcome.step_s,
        "spent": {what: outcome.mean(what) for what in (COMPUTE, *WAITS)},
        "idle_s": [min(outcome.idle_s), max(outcome.idle_s)],
        "between_nbytes": max(outcome.between_nbytes),
        "messages": max(outcome.messages),
        "links": outcome.links,
        "used": outcome.used,
        "binds": outcome.binds,
        "foretold_s": forecast.step_s,
        "foretold_compute_s": computing,
        "took_s": time.perf_counter() - begin,
        "peak_nbytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
