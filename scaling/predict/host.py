"""This host as a machine of `hpczero.predict.model`, from what it measured of itself; without torch and MPI."""

from __future__ import annotations

from typing import Literal

from hpczero.models.config import GPTConfig
from hpczero.predict.job import Job
from hpczero.predict.machine import Machine, MeasuredKernels, machine_of
from hpczero.predict.model import Prediction, predict
from scaling.evidence.host import kernel_nbytes
from scaling.evidence.record import cores, machine_name

Known = Literal["flat", "hierarchical", "window"]
# How ``Collectives.describe`` begins on one node, and which transport of the model that is.
TRANSPORTS: dict[str, Known] = {"flat": "flat", "messages": "hierarchical"}
TRANSPORTS["shared memory"] = "window"


def host_machine(measured: MeasuredKernels, ranks: int) -> Machine:
    """This host as a Machine for so many ranks on it."""
    per_node = max(cores(), ranks)
    memory = kernel_nbytes("/proc/meminfo", "MemTotal:") / per_node
    return machine_of(measured, ranks_per_node=per_node, memory_nbytes=memory, title=machine_name())


def predict_on_host(
    model: GPTConfig,
    measured: MeasuredKernels,
    *,
    ranks: int,
    transport: Known | None = None,
    **of: int,
) -> Prediction:
    """One step in fp32 on so many ranks of this host.

    Args:
        model: its sizes.
        measured: by as many ranks at once.
        ranks: all on this host.
        transport: between them; None: what ``auto`` takes on one node.
        of: ``stage``, ``micro_batch`` and, if it is not 1, ``accumulation`` of the job.
    """
    job = Job.plain(
        model,
        host_machine(measured, ranks),
        ranks,
        precision="fp32",
        checkpointing=model.checkpoint_activations,
        transport=transport or ("window" if ranks > 1 else "flat"),
        kernels=measured,
        **of,
    )
    return predict(job)


def transport_of(described: str) -> Known | None:
    """Which transport of the model a record speaks of; None where the model has none such.

    Args:
        described: by ``Collectives.describe`` of the transport that ran, whatever was asked for.
    """
    return next((known for name, known in TRANSPORTS.items() if described.startswith(name)), None)
