"""One point of a scaling study, as one MPI job: ``mpirun -n 2 python -m scaling.sweep.point JSON FILE``.

Every rank times its own steps; rank 0 writes the row when all is done, so a file is either whole or not there.
The steps are those of training (``hpczero.run.step``); the tokens are drawn at random and lie in memory.

A device does later what the host starts now. Before a clock is read that separates one part of a step from the next,
the host waits for the device, so that a part's time is the device's; where it stood still for collectives, its own
clock says (``hpczero.comm.calls``).
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpczero.errors import ConfigError, run
from scaling.evidence.host import Host, Share, cpus, foreign_share, numbers, oversubscribed
from scaling.evidence.record import UNKNOWN, Recorder, Row, circumstances, mpi_library
from scaling.sweep.study import ALL_PARTS, Point

if TYPE_CHECKING:
    from hpczero.accelerator import Accelerator
    from hpczero.job.topology import Topology

MEMORY_STEPS = 3  # after the timed ones, while a thread looks at the PSS
NUM_TOKENS = 2**20
MEMORY = ("pss_peak_nbytes", "pss_baseline_nbytes", "ledger_nbytes", "device_peak_nbytes")


def main() -> int:
    """Measure the point given as JSON and write its row to the file given. Collective over MPI's world."""
    if len(sys.argv) != 3 or sys.argv[1].startswith("-"):
        sys.stdout.write(f"usage: python -m scaling.sweep.point JSON FILE\n\n{main.__doc__}\n")
        return 0 if sys.argv[1:] in (["--help"], ["-h"]) else ConfigError.exit_code
    order = read_order(sys.argv[1])
    point = Point.of_json(order["point"])
    from hpczero.accelerator import choose_accelerator

    accelerator = choose_accelerator(point.device)  # before MPI binds to a device
    import torch

    from hpczero.job.launch import start_topology, use_own_cores
    from hpczero.plan.degrees import mesh_on_nodes

    topology = start_topology(None, lambda nodes: mesh_on_nodes(point.layout, nodes))
    if point.threads:
        torch.set_num_threads(point.threads)
    else:
        use_own_cores(topology)
    with topology.agreed("check the ranks of the point"):
        if topology.size != point.ranks or topology.num_nodes != point.nodes:
            raise ConfigError(
                f"got {topology.size} rank(s) on {topology.num_nodes} node(s), the point is for {point.ranks} on "
                f"{point.nodes}; start that many, or name HPCZERO_FAKE_NODES"
            )
    row = measure(topology, point, accelerator)
    if topology.is_root:
        if row["commit"] == UNKNOWN:  # no git on this node; the one that submitted had it
            row["commit"] = order["commit"]
        with Recorder(Path(sys.argv[2])) as recorder:
            recorder.write("point", {**order, **row})
    topology.free()
    return 0


def read_order(text: str) -> dict[str, Any]:  # Any: JSON
    """The point that the sweep asks for, its key, and what the sweep knows: commit and setting.

    Raises:
        ConfigError: something else.
    """
    try:
        order = json.loads(text)
        return {name: order[name] for name in ("key", "commit", "setting", "point")}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"got {text!r}, expected the JSON that scaling.sweep gives: {error!r}"
        ) from error


def measure(topology: Topology, point: Point, accelerator: Accelerator) -> Row:
    """The row of ``point``; whole on rank 0. Collective."""
    import torch

    import hpczero
    from hpczero.models import flops_per_token
    from hpczero.models.config import parameter_count
    from hpczero.probe.job import measure_kernels as probe
    from scaling.contenders.rank import load_libraries
    from scaling.evidence.harness import placement
    from scaling.evidence.host import PeakPss, machine_seconds, pss_nbytes

    load_libraries()
    baseline = pss_nbytes()
    with ExitStack() as stack:
        trainer = Trainer(topology, point, stack, accelerator)
        losses = [trainer.step()[1] for _ in range(point.warm_up)]
        sharding = hpczero.sharding(trainer.model)
        sharding.memory.reset_peak()  # set-up is not part of a step
        accelerator.reset_peak()
        here = Host.here()
        topology.barrier()
        begin, busy, own = time.perf_counter(), machine_seconds(), time.process_time()
        splits = []
        for _ in range(point.steps):
            split, loss = trainer.step()
            splits.append(split)
            losses.append(loss)
        window_s = time.perf_counter() - begin
        share = Share(here, time.process_time() - own, machine_seconds() - busy, window_s)
        with PeakPss() as peak:
            losses += [trainer.step()[1] for _ in range(MEMORY_STEPS)]
        ledger = sum(sharding.memory.peak.values()) + sharding.optimizer_nbytes()
        footprint = sharding.collectives.footprint
        planned = sharding.plan.memory(footprint=footprint)
        traffic = sharding.plan.traffic(footprint=footprint)
        described = sharding.collectives.describe()
        # For a prediction beside the measurement; it measures the host, which says nothing of a device.
        probed = probe(topology) if accelerator.is_host else None
    trainer.close()
    mine = {
        "samples": {
            part: [round(getattr(split, f"{part}_ms"), 4) for split in splits] for part in ALL_PARTS
        },
        "losses": losses,
        "pss_peak_nbytes": peak.nbytes,
        "pss_baseline_nbytes": baseline,
        "ledger_nbytes": ledger,
        "device_peak_nbytes": accelerator.usage().get("allocated_peak", 0),
        "device": (accelerator.device.type, accelerator.describe().partition(", as ")[0]),
        "probe": probed,
        "share": share,
    }
    ranks = topology.world.comm.gather(mine, root=0) or [mine]
    hosts = [rank["share"].host for rank in ranks]
    return {
        **circumstances(),
        "cpu": cpus(hosts),
        "device": " and ".join(sorted({rank["device"][0] for rank in ranks})),
        "device_name": " and ".join(sorted({rank["device"][1] for rank in ranks})),
        "point": point.as_json(),
        "mpi": mpi_library(),
        "slurm_job": os.environ.get("SLURM_JOB_ID", ""),
        "placement": placement(topology),
        "ranks_per_node": [len(node) for node in topology.world.nodes],
        "hosts": numbers(hosts),
        # Nodes that are one machine in truth: whatever is measured between them is no scaling.
        "emulated": topology.num_nodes > len(set(numbers(hosts))),
        "oversubscribed": oversubscribed(hosts),
        "transport": described,
        "threads": torch.get_num_threads(),
        "parameters": parameter_count(point.config),
        "flops_per_token": flops_per_token(point.config),
        "samples_ms": {  # a list of all ranks for each step
            part: list(map(list, zip(*(rank["samples"][part] for rank in ranks), strict=True)))
            for part in ALL_PARTS
        },
        "losses": [
            math.fsum(values) / len(values)
            for values in zip(*(rank["losses"] for rank in ranks), strict=True)
        ],
        **{name: [rank[name] for rank in ranks] for name in MEMORY},
        "planned": {**dataclasses.asdict(planned), "total": planned.total, "sent": traffic.nbytes},
        "foreign_share": foreign_share([rank["share"] for rank in ranks]),
        "probe": [rank["probe"] for rank in ranks if rank["probe"] is not None],
    }


class Trainer:
    """The model, its data and its steps; ``close`` gives the model back, ``stack`` the folder of its checkpoints."""

    def __init__(
        self, topology: Topology, point: Point, stack: ExitStack, accelerator: Accelerator
    ) -> None:
        from hpczero.adapters.gpt import GPTAdapter
        from hpczero.data import Batches
        from scaling.contenders.base import drawn
        from scaling.contenders.training import GPTTraining

        self._topology, self._point = topology, point
        tokens = drawn(point.seed, point.config.vocab_size, NUM_TOKENS).astype("uint32")
        self._batches = Batches(tokens, point.config.context, point.global_batch, point.seed)
        self._accumulation = point.batch // point.micro_batch
        self._training = GPTTraining(
            GPTAdapter(point.config),
            topology,
            self._samples,
            point.layout,
            accumulation=self._accumulation,
            device=accelerator,
            waits=True,
            seed=point.seed,
            stage=point.stage,
            precision=point.precision,
            transport=point.transport,
        )
        self.model, self.close = self._training.model, self._training.close
        self._checkpoints = _checkpoints(self.model, topology, point, stack)

    def _samples(self, number: int, micro_step: int) -> tuple[Any, Any]:  # Any: numpy arrays
        data = self._topology.data
        return self._batches.micro_batch(
            number, micro_step, data.rank, data.size, self._accumulation
        )

    def step(self) -> tuple[Any, float]:  # Any: StepSplit, which would load the framework
        """One optimizer step: (its split on this rank, loss of this rank's samples). Collective."""
        from hpczero.run.results.metrics import StepSplit

        taken, done = self._training.take(), self._training.taken
        if self._checkpoints is not None and done % self._point.checkpoint_every == 0:
            with taken.watch.phase("checkpoint"):
                self._checkpoints.save(done)
        return StepSplit.of(taken.watch, taken.step_s), taken.own_loss


def _checkpoints(model: Any, topology: Topology, point: Point, stack: ExitStack) -> Any:
    """Where the point saves; None where it does not. In a folder that is gone afterwards."""
    if not point.checkpoint_every:
        return None
    from hpczero.checkpoint import Checkpoints

    folder = ""
    with topology.agreed("make a folder for checkpoints"):
        if topology.is_root:
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=".", prefix="point-"))
    folder = topology.broadcast_text(folder)
    return stack.enter_context(Checkpoints(Path(folder), model, keep=1))


if __name__ == "__main__":
    run(main)
