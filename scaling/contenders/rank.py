"""One rank of one contender: ``python -m scaling.contenders.rank JSON``, started by `scaling.contenders.ranks`.

Between commands it blocks in a read of its socket, never in MPI or gloo, so that a sleeping contender takes no CPU
time.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from hpczero.errors import run
from scaling.contenders.base import Contender, adamw, batch
from scaling.contenders.workload import Workload
from scaling.evidence.host import PeakPss, pss_nbytes

Reply = dict[str, Any]  # Any: JSON


class Rank:
    """Answers the commands of the crew; one method for each."""

    def __init__(self, contender: Contender, workload: Workload) -> None:
        self._contender = contender
        self._workload = workload
        self._next_step = 0
        self.ended = False

    def build(self) -> Reply:
        """Make the model; says how much memory that took at most."""
        with PeakPss() as peak:
            self._contender.build(self._workload)
        return {"settings": self._contender.settings(), "peak_nbytes": peak.nbytes}

    def turn(self, steps: int) -> Reply:
        """Train ``steps`` steps; says how long all together took, and each loss."""
        ours = range(self._next_step, self._next_step + steps)
        batches = [
            batch(self._workload, step=step, rank=self._contender.data_rank) for step in ours
        ]
        self._contender.barrier()
        faults, cpu, begin = _page_faults(), time.process_time(), time.perf_counter()
        losses = [self._contender.step(tokens, targets) for tokens, targets in batches]
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        self._next_step = ours.stop
        return {
            "seconds": seconds,
            "cpu_s": cpu,
            "page_faults": _page_faults() - faults,
            "losses": losses,
        }

    def memory(self, steps: int) -> Reply:
        """Train ``steps`` steps; says the largest PSS meanwhile. Times mean nothing here."""
        with PeakPss() as peak:
            losses = self.turn(steps)["losses"]
        return {"peak_nbytes": peak.nbytes, "losses": losses}

    def probe(self) -> Reply:
        """What the ranks of an hpczero contender, all at once, measure of their host."""
        from hpczero.probe.job import measure_kernels

        return measure_kernels(self._contender.topology)  # type: ignore[attr-defined]  # of hpczero

    def end(self) -> Reply:
        """Leave the other ranks."""
        self._contender.close()
        self.ended = True
        return {}


def _page_faults() -> int:
    """Pages the kernel had to fetch or clear for this process so far; each costs a microsecond or more."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def load_libraries() -> None:
    """One step of one weight: torch loads 70 MB of its own on the first use of an optimizer, which is not state."""
    model = torch.nn.Linear(1, 1)
    optimizer = adamw(model.parameters())
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()


def main(kind: type[Rank] = Rank) -> int:
    """Connect, say hello, answer until told to end; ``kind`` says to what."""
    order = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    module = importlib.import_module(f"scaling.contenders.{order['module']}")
    contender: Contender = getattr(module, order["kind"])(**order["arguments"])
    contender.connect()
    load_libraries()
    rank = kind(contender, Workload(**order["workload"]))
    with socket.socket(socket.AF_UNIX) as crew:
        crew.connect(order["address"])
        with crew.makefile("rw", encoding="utf-8") as lines:

            def say(reply: Reply) -> None:
                lines.write(json.dumps(reply) + "\n")
                lines.flush()

            say({"rank": contender.rank, "pid": os.getpid(), "baseline_nbytes": pss_nbytes()})
            while not rank.ended:
                order = json.loads(lines.readline())
                answer: Callable[..., Reply] = getattr(rank, order.pop("do"))
                say(answer(**order))
    return 0


if __name__ == "__main__":
    run(main)
