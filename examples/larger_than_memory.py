"""A model larger than memory: its state rests on disk, and passes through memory window by window.

mpirun -n 2 python examples/larger_than_memory.py --preset gpt2 --folder /local/scratch
"""

from __future__ import annotations

import argparse
import dataclasses
import resource
import time
from pathlib import Path

import torch

import hpczero
from hpczero.models import GPT, PRESETS

parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
parser.add_argument("--preset", default="gpt-nano", choices=sorted(PRESETS))
parser.add_argument("--layers", type=int, help="blocks; without it those of the preset")
parser.add_argument("--context", type=int, default=128, help="tokens of a sequence")
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--folder", default=".", help="on a disk of this node, not in memory")
parser.add_argument("--window", type=int, default=32, help="MiB of one block of staging")
parser.add_argument("--resident", action="store_true", help="keep everything in memory instead")
options = parser.parse_args()

topology = hpczero.Topology.of_world()
torch.set_num_threads(1)
config = dataclasses.replace(
    PRESETS[options.preset], context=options.context, checkpoint_activations=True
)
if options.layers is not None:
    config = dataclasses.replace(config, layers=options.layers)

with torch.device("meta"):  # no rank holds the whole model, not even at the start
    model = GPT(config)
decayed = [p for p in model.parameters() if p.dim() > 1]
others = [p for p in model.parameters() if p.dim() <= 1]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
    lr=3e-4,
    fused=True,  # an order of magnitude faster on a host than torch's default
)
offload = hpczero.Offload(
    "disk", "disk", "disk", folder=options.folder, window=options.window * 2**20
)
hpczero.zeroify(
    model,
    optimizer,
    stage=3,
    topology=topology,
    initialize=model.initial_weights(seed=0),
    offload=None if options.resident else offload,
)

# Real text, byte by byte: the sources of torch.
folder = Path(torch.__file__).parent / "nn" / "modules"
text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence of this rank; inputs and targets, (1, context)."""
    begin = (step * topology.size + topology.rank) * config.context
    part = tokens[begin : begin + config.context + 1]
    return part[None, :-1], part[None, 1:]


before = None
for step in range(options.steps):
    began = time.perf_counter()
    loss = model(*batch_of(step))
    loss.backward()
    middle = time.perf_counter()
    norm = hpczero.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    ended = time.perf_counter()
    mean = sum(topology.gather(loss.item())) / topology.size
    peaks = topology.gather(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    if topology.is_root:
        print(
            f"step {step}  loss {mean:.6f} ({mean.hex()})  gradient norm {norm:.4f}  forward and backward "
            f"{middle - began:.1f} s, update {ended - middle:.1f} s, peak {max(peaks):,.0f} MiB of a rank",
            flush=True,
        )
        tier = hpczero.sharding(model).away.store
        if tier is not None:
            now = tier.tier.traffic.total
            moved = now if before is None else now - before
            before = now
            print(
                f"        read {moved.read_nbytes / 1e9:.2f} GB, wrote {moved.written_nbytes / 1e9:.2f} GB, waited "
                f"{moved.waited_s:.1f} s for them",
                flush=True,
            )
hpczero.release(model)
topology.free()
