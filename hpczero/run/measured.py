"""The record of a step, from what the step, the shards and the device say; and which ranks are slow."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import hpczero
from hpczero.job import log
from hpczero.job.topology import Topology
from hpczero.planner.choice import Predicted, nbytes
from hpczero.predict.answer import seconds
from hpczero.run.evaluation import Found
from hpczero.run.results.metrics import (
    StepMetrics,
    achieved_tflops,
    device_fields,
    process_peak_nbytes,
)
from hpczero.run.setup import Run
from hpczero.run.step import Taken

STEPS = 10  # the first of them, which allocates, does not count


class Expectation:
    """Of one run; without a planner it says nothing. Not collective."""

    def __init__(self, predicted: Predicted | None) -> None:
        self._predicted = predicted
        self._seen: list[float] = []

    def note(self, step_s: float) -> None:
        """Add one step; after ``STEPS`` rank 0 says how it went."""
        if self._predicted is None:
            return
        self._seen.append(step_s)
        if len(self._seen) == STEPS:
            log.info("%s", line(self._predicted, statistics.median(self._seen[1:])))
            self._predicted = None


def line(predicted: Predicted, step_s: float) -> str:
    """Predicted and seen, with their ratio."""
    ratio = step_s / predicted.step_s
    peak = nbytes(process_peak_nbytes())
    return (
        f"planner: predicted {seconds(predicted.step_s)} a step, seen {seconds(step_s)} ({ratio:.2f} of it); predicted "
        f"up to {nbytes(predicted.run.most)} a rank beside Python, torch and MPI, seen {peak} with them"
    )


# Which rank slows the others down, every K steps, with the name of its host.
#
# The measure is a rank's own work: loading, forward and backward without waits for others. The time in collectives
# would say the opposite, because the slowest rank waits least. A rank is compared with the others, and with its own
# best. Source of the measure and of 0.7: NVIDIA's nvidia-resiliency-ext, ``gpu_relative_perf_threshold``.

THRESHOLD = 0.7  # speed relative to the others, or to itself
LEAST_S = 0.02  # what is lost per step, below which nothing is said
MOST_NAMED = 8


class Stragglers:
    """Own work of one rank since the last report."""

    def __init__(self, topology: Topology, *, every: int) -> None:
        """Not collective. ``every`` is the number of steps between reports; 0 reports nothing."""
        self._topology = topology
        self._every = every
        self._window: list[float] = []
        self._best: float | None = None

    def note(self, own_s: float) -> None:
        """Add one step: seconds of this rank's own work. Not collective."""
        if self._every:
            self._window.append(own_s)

    def report(self, done: int) -> list[str]:
        """Lines about ranks that are slow after ``done`` steps, the same on every rank; none if no report is due.

        Collective over the topology's world.
        """
        if not self._every or done % self._every or not self._window:
            return []
        own_s = statistics.median(self._window)
        self._window.clear()
        self._best = own_s if self._best is None else min(self._best, own_s)
        now, best = self._topology.gather(own_s), self._topology.gather(self._best)
        slow, tired = slower_than_others(now), slower_than_before(now, best)
        if not slow and not tired:
            return []
        hosts = self._topology.world.hosts()
        typical = statistics.median_low(now)
        lines = [
            f"straggler: rank {rank} on {hosts[rank]} works {now[rank] * 1e3:.1f} ms per step, others "
            f"{typical * 1e3:.1f} ms ({typical / now[rank]:.2f} of their speed)"
            for rank in slow[:MOST_NAMED]
        ]
        lines += [
            f"straggler: rank {rank} on {hosts[rank]} works {now[rank] * 1e3:.1f} ms per step, at its best "
            f"{best[rank] * 1e3:.1f} ms ({best[rank] / now[rank]:.2f} of its own speed)"
            for rank in [r for r in tired if r not in slow][:MOST_NAMED]
        ]
        left_out = len({*slow, *tired}) - len(lines)
        return [*lines, f"straggler: {left_out} more rank(s) are slow"] if left_out > 0 else lines


def slower_than_others(own_s: Sequence[float]) -> list[int]:
    """Ranks below the threshold of the typical rank's speed, slowest first."""
    typical = statistics.median_low(own_s)
    return _below([typical] * len(own_s), own_s)


def slower_than_before(own_s: Sequence[float], best_s: Sequence[float]) -> list[int]:
    """Ranks below the threshold of their own best speed, slowest first."""
    return _below(best_s, own_s)


def _below(wanted_s: Sequence[float], own_s: Sequence[float]) -> list[int]:
    found = [
        rank
        for rank, (wanted, own) in enumerate(zip(wanted_s, own_s, strict=True))
        if wanted < THRESHOLD * own and own - wanted > LEAST_S
    ]
    return sorted(found, key=lambda rank: -own_s[rank])


def metrics_of(
    run: Run, taken: Taken, done: int, found: Found | None, tasks: Mapping[str, float] | None
) -> StepMetrics:
    """The record of the step that makes ``done`` steps, before the save that may follow it. Not collective."""
    sharding, watch = hpczero.sharding(run.model), taken.watch
    tokens = run.batch.global_batch * run.adapter.context
    tokens_per_s = tokens / taken.step_s
    size = run.given.topology.size * run.config.groups
    tflops = achieved_tflops(tokens_per_s, run.flops_per_unit, size)
    peak = run.peak_tflops
    return StepMetrics(
        step=done,
        tokens=done * tokens,
        loss=taken.loss,
        held_out_loss=None if found is None else found.loss,
        learning_rate=taken.learning_rate,
        grad_norm=taken.grad_norm,
        loss_scale=sharding.loss_scale,
        skipped_steps=sharding.skipped_steps,
        tokens_per_s=tokens_per_s,
        tflops=tflops,
        mfu=None if peak is None else tflops / peak,
        step_ms=taken.step_s * 1e3,
        data_ms=watch.ms("data"),
        forward_ms=watch.ms("forward"),
        backward_ms=watch.ms("backward"),
        optimizer_ms=watch.ms("optimizer"),
        communication_ms=taken.communication_ms,
        checkpoint_ms=0.0,
        held_out_metric=None if found is None else found.metric,
        lm_eval=tasks,
        held_out_since=run.patience.since if found and run.config.evaluation.patience else None,
        **tier_fields(taken),
        **peaks(run, taken.exposed_s),
    )


def after_save(run: Run, taken: Taken, measured: StepMetrics) -> StepMetrics:
    """``measured``, with the cost of a save after the step. Not collective."""
    saving_ms = taken.watch.ms("checkpoint")
    return dataclasses.replace(measured, checkpoint_ms=saving_ms, **peaks(run, taken.exposed_s))


def tier_fields(taken: Taken) -> dict[str, Any]:
    """The fields of ``StepMetrics`` that are of memory tiers; none where nothing rests there."""
    fields: dict[str, Any] = {}
    for name, flow in (("tier", taken.tier), ("activations", taken.activations)):
        if flow is not None:
            fields[f"{name}_read_nbytes"] = flow.read_nbytes
            fields[f"{name}_written_nbytes"] = flow.written_nbytes
            fields[f"{name}_waited_ms"] = flow.waited_s * 1e3
    return fields


def peaks(run: Run, exposed_s: float) -> dict[str, Any]:
    """The fields of ``StepMetrics`` that a save after the step may raise."""
    sharding = hpczero.sharding(run.model)
    return {
        "state_peak_nbytes": sum(sharding.memory.peak.values()) + sharding.optimizer_nbytes(),
        "process_peak_nbytes": process_peak_nbytes(),
        **device_fields(run.given.accelerator.usage(), exposed_s),
    }
