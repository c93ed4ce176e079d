"""The golden run: losses of a tiny GPT on one rank, and the file they are kept in.

``install/launch.sh 1 .venv/bin/python -m tests.golden.record`` writes the file anew. Do that only for a change that is
meant to alter numerics, in its own commit, with the reason in the message.
"""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import hpczero
from hpczero import Topology
from hpczero.models import GPT, GPTConfig

FILE = Path(__file__).with_name("gpt_fp32.json")
STEPS = 20


@dataclass(frozen=True)
class Machine:
    """What the last bit of a loss depends on: the kernels of torch, and which of them this processor gets."""

    torch: str
    capability: str
    processor: str

    @classmethod
    def here(cls) -> Machine:
        """This machine."""
        return cls(torch.__version__, torch.backends.cpu.get_cpu_capability(), _processor())


def _processor() -> str:
    """Vendor, family and model as Linux names them; the matrix library chooses its kernels by these."""
    wanted = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return platform.machine()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    return " ".join(f"{fields[name]}" for name in wanted if name in fields) or platform.machine()


def losses(topology: Topology, *, stage: int) -> list[float]:
    """Loss of each step of the golden run, on one rank and one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _train(topology, stage)
    finally:
        torch.set_num_threads(threads)


def _train(topology: Topology, stage: int) -> list[float]:
    model = GPT(GPTConfig(vocab_size=61, context=16, layers=2, hidden=24, heads=3))
    model.initialize_all(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    hpczero.zeroify(model, optimizer, stage=stage, topology=topology)
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(STEPS):
        start = torch.randint(0, 61, (4, 1), generator=generator)
        text = (start + 7 * torch.arange(17)) % 61  # something to learn
        loss = model(text[:, :-1], text[:, 1:])
        loss.backward()
        hpczero.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    hpczero.release(model)
    return found


def read() -> tuple[Machine, list[float]]:
    """Where the file was recorded, and the losses."""
    content = json.loads(FILE.read_text())
    return Machine(**content["recorded_on"]), [float.fromhex(x) for x in content["losses"]]


def write(found: list[float]) -> None:
    """Record ``found`` as this machine's."""
    content = {"recorded_on": asdict(Machine.here()), "losses": [x.hex() for x in found]}
    FILE.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    world = Topology.of_world()
    write(losses(world, stage=3))
    world.free()
