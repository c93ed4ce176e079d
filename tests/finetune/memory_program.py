"""A Llama of 50 million parameters, its base in 4 bits, trains low-rank products; says what each rank held.

``install/launch.sh 2 python -m tests.finetune.memory_program FOLDER flat``, or ``window``: a line of JSON a rank.
``resident`` is VmHWM of the steps above VmRSS before the model was made; of memory that ranks share, each counts its
part. The first block alone has trained by then, so that libraries have what they make once for such sizes. Blocks of
memory should go back to the kernel when they are freed (``MALLOC_MMAP_THRESHOLD_=65536``), else the heap keeps what was
taken for first values, and holes.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from mpi4py import MPI
from torch import Tensor

import hpczero
from hpczero import finetune

LARGE: dict[str, Any] = {
    "hidden_size": 640,
    "intermediate_size": 1728,
    "num_hidden_layers": 8,
    "vocab_size": 8192,
}
FIRST: dict[str, Any] = {**LARGE, "num_hidden_layers": 1}
STEPS, LENGTH = 5, 4  # few tokens: activations are a few per cent of what is held


def made(sizes: dict[str, Any], **where: Any) -> Any:
    """The model with products; ``device="meta"``: without values."""
    config = transformers.LlamaConfig(
        **sizes, num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=64
    )
    with torch.device(where.get("device", "cpu")):
        model = transformers.LlamaForCausalLM(config)
        finetune.lora(model, rank=8, alpha=16)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # buffers have values
    return model


def fill(name: str, values: Tensor) -> None:
    """First values of the base; norms are one."""
    if values.dim() == 1:
        values.fill_(1.0)
    else:
        values.normal_(0.0, 0.02, generator=torch.Generator().manual_seed(len(name)))


def tokens(rank: int, step: int) -> Tensor:
    """(1, LENGTH) int64."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, LARGE["vocab_size"], (1, LENGTH), generator=generator)


def status(field: str) -> int:
    """Bytes of this process, as the kernel counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{field}:")))


def sharded(sizes: dict[str, Any], topology: hpczero.Topology, transport: str) -> tuple[Any, Any]:
    """Model and optimizer."""
    model = made(sizes, device="meta")
    optimizer = torch.optim.AdamW(finetune.trained(model), lr=1e-3)
    hpczero.zeroify(
        model,
        optimizer,
        topology=topology,
        transport=transport,
        precision="bf16",
        quantize="nf4",
        initialize=finetune.first_values(fill),
    )
    return model, optimizer


def train(model: Any, optimizer: Any, steps: range) -> float:
    """The last loss of this rank."""
    loss = torch.zeros(())
    for step in steps:
        ids = tokens(MPI.COMM_WORLD.rank, step)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def logits(model: Any) -> Tensor:
    """(1, LENGTH, vocabulary)."""
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=tokens(0, 99)).logits
    return found


def off(folder: Path, state: dict[str, Tensor]) -> float:
    """Largest difference of logits of the saved folder and of what one process merges."""
    here = made(LARGE)
    here.load_state_dict(state)
    finetune.merge(here)
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    return float((logits(load(folder)) - logits(here)).abs().max())


def main(folder: str, transport: str) -> None:
    """Collective over MPI's world."""
    topology = hpczero.Topology.of_world()
    small, optimizer = sharded(FIRST, topology, transport)
    train(small, optimizer, range(2))
    hpczero.release(small)
    del small, optimizer
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before, shared = status("VmRSS"), status("RssShmem")

    model, optimizer = sharded(LARGE, topology, transport)
    sharding = hpczero.sharding(model)
    first = train(model, optimizer, range(1))
    Path("/proc/self/clear_refs").write_text("5")
    sharding.memory.reset_peak()
    last = train(model, optimizer, range(1, STEPS))
    resident, shared = status("VmHWM") - before, status("RssShmem") - shared

    plan = sharding.plan.memory(footprint=sharding.collectives.footprint)
    ledger = {**sharding.memory.peak, "optimizer": sharding.optimizer_nbytes()}
    numel = sharding.plan.numel
    finetune.save_merged(model, Path(folder) / "merged")
    state = hpczero.full_state_dict(model)
    hpczero.release(model)
    found = {
        "rank": topology.rank,
        "transport": transport,
        "parameters": numel,
        "losses": [first, last],
        "ledger": ledger,
        "plan": {name: getattr(plan, name) for name in ("total", *ledger) if hasattr(plan, name)},
        "resident": resident - shared * (topology.size - 1) // topology.size,
        "shared": shared,
        "off": off(Path(folder) / "merged", state) if state is not None else 0.0,
    }
    sys.stdout.write(f"{json.dumps(found)}\n")
    sys.stdout.flush()
    topology.free()


if __name__ == "__main__":
    main(*sys.argv[1:])
