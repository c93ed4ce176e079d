"""This host as a machine of `hpczero.predict.model`, from what it measured of itself.

Owns: which measurement stands for which number of a machine. Must not know: how anything was measured, torch, MPI.
"""

from __future__ import annotations

from hpczero.predict.machine import Machine
from hpczero.probe.measured import Measured

RESERVED_NBYTES = 0.3e9  # Python, torch and MPI: 265 MiB (docs/performance.md)


def machine_of(
    measured: Measured, *, ranks_per_node: int, memory_nbytes: float, title: str
) -> Machine:
    """The measured host as a machine of so many ranks on each node.

    Args:
        measured: by as many ranks at once as will train.
        ranks_per_node: ranks of a node.
        memory_nbytes: bytes of one rank.
        title: for reports.
    """
    between = measured.between or measured.exchange or measured.memory_rate
    return Machine(
        name="host",
        title=title,
        ranks_per_node=ranks_per_node,
        memory=memory_nbytes,
        reserved=RESERVED_NBYTES,
        peak=dict.fromkeys(("fp32", "bf16", "fp16"), max(measured.products.values())),
        matmul_efficiency=1.0,
        memory_rate=measured.memory_rate,
        dispatch=measured.dispatch,
        node_rate=measured.exchange or measured.memory_rate,
        node_latency=measured.wait or 0.0,
        nics=ranks_per_node,  # the rate between nodes is that of one rank while all send
        nic_rate=between,
        nic_latency=measured.wait_between or measured.wait or 0.0,
        disk_read=measured.disk_read or 0.0,
        disk_write=measured.disk_write or 0.0,
        host_read=measured.host_read or 0.0,
        host_write=measured.host_write or 0.0,
        host_update=1 / measured.host_update if measured.host_update else 0.0,
        fresh_rate=measured.fresh or 0.0,
        shares_memory=True,
        sources={"all": "measured by hpczero.probe"},
    )
