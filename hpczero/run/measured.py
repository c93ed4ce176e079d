"""The record of a step, from what the step, the shards and the device say.

Owns: which figure comes from where. Must not know: what becomes of a record.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import hpczero
from hpczero.run.evaluation import Found
from hpczero.run.results.metrics import (
    StepMetrics,
    achieved_tflops,
    device_fields,
    process_peak_nbytes,
)
from hpczero.run.setup import Run
from hpczero.run.step import Taken


def metrics_of(run: Run, taken: Taken, done: int, found: Found | None) -> StepMetrics:
    """The record of the step that makes ``done`` steps, before the save that may follow it. Not collective."""
    sharding, watch = hpczero.sharding(run.model), taken.watch
    tokens = run.batch.global_batch * run.adapter.context
    tokens_per_s = tokens / taken.step_s
    size = run.given.topology.size
    tflops = achieved_tflops(tokens_per_s, run.flops_per_unit, size)
    peak = run.config.log.peak_tflops
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
