"""The step of a run, by the model of `hpczero.predict`.

Owns: the translation of a run into a job on a machine. Must not know: how anything was measured, torch, MPI.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from hpczero.models.config import GPTConfig
from hpczero.plan.peak import Run
from hpczero.predict.job import Job, balance_of
from hpczero.predict.machine import Kernels, Machine, Roofline
from hpczero.predict.model import Prediction, predict


def foretell_on(
    model: GPTConfig, machine: Machine, kernels: Kernels | None = None
) -> Callable[[Run], Prediction]:
    """What foretells the step of any run of ``model`` on ``machine``.

    Args:
        model: sizes of the model.
        machine: each node is one like it.
        kernels: of one rank; None: by the machine's data sheet.
    """

    def foretell(run: Run) -> Prediction:
        job = Job(
            model=dataclasses.replace(model, context=run.sequence),
            machine=machine,
            ranks=run.ranks,
            stage=run.stage,
            precision=run.precision,
            reduce=run.reduce,
            micro_batch=run.micro_batch,
            accumulation=run.accumulation,
            checkpointing=run.checkpointing,
            transport=run.transport,
            kernels=kernels,
            ranks_per_node=run.local_size,
            offload=run.offload,
            kept=run.kept,
        )
        return predict(job)

    return foretell


def balance_on(run: Run, machine: Machine, kernels: Kernels | None = None) -> float | None:
    """The fraction with which host and device end their updates of ``run`` together; None: no such host is known.

    Args:
        run: with its precision; what else it chooses does not matter.
        machine: each node is one like it.
        kernels: of one rank; None: by the machine's data sheet.
    """
    itemsize = run.plan.precision.param_itemsize
    work = kernels or Roofline(machine, run.precision, itemsize)
    return balance_of(machine, work, up=itemsize)
