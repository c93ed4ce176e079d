"""Training checks on one device that ranks share: parity, speed beside plain torch, memory, overlap, a model that fits.

Owns: what each check trains. Must not know: limits, goals. See ``scaling.gpu_checks``, which runs them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import hpczero
from hpczero.models import GPT, GPTConfig
from scaling.gpu_checks import Bench, Row, tflops, tokens_per_s

STEPS = 4
WARM_UP = 3
TIMED = 8


def _tokens(
    config: GPTConfig, sequences: int, seed: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(config.vocab_size, (sequences, config.context + 1), generator=generator)
    return drawn[:, :-1].contiguous().to(device), drawn[:, 1:].contiguous().to(device)


def _built(config: GPTConfig) -> GPT:
    model = GPT(config)
    model.initialize_all(seed=0)
    return model


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3, fused=True)


def _sharded(
    bench: Bench, config: GPTConfig, *, quickly: bool = False, **options: Any
) -> tuple[nn.Module, Any]:
    """``quickly``: with values that are random enough to compute with, for the large ones."""
    with torch.device("meta"):
        model = GPT(config)
    optimizer = _adamw(model)

    def initialize(name: str, tensor: Tensor) -> None:
        if quickly:
            _fill(tensor)
        else:
            model.initialize(name, tensor, seed=0)

    given = {"topology": bench.topology, **options}
    hpczero.zeroify(model, optimizer, device=bench.accelerator, initialize=initialize, **given)
    return model, optimizer


def _fill(tensor: Tensor) -> None:
    """The same million small random numbers again and again."""
    tile = 0.02 * torch.randn(2**20, generator=torch.Generator().manual_seed(0))
    flat, tile = tensor.view(-1), tile.to(tensor.device)
    for start in range(0, flat.numel(), len(tile)):
        piece = flat[start : start + len(tile)]
        piece.copy_(tile[: len(piece)])


def _train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss: Tensor = model(x, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _forget(bench: Bench) -> None:
    gc.collect()
    if not bench.accelerator.is_host:
        torch.cuda.empty_cache()


def parity(bench: Bench) -> Iterator[Row]:
    """Stages and transports against each other, bit by bit, and against one plain torch process, in fp32."""
    config, device, size = bench.sizes.tiny, bench.accelerator.device, bench.topology.size
    samples = [_tokens(config, size, step, device) for step in range(STEPS)]
    plain = _built(config).to(device)
    optimizer = _adamw(plain)
    expected = [float(_train(plain, optimizer, x, y)) for x, y in samples]
    ways = ["flat", "hierarchical", "ipc"] if size > 1 else ["flat"]
    for precision in ("fp32", "bf16"):
        first: list[float] | None = None
        for stage in range(4):
            for way in ways:
                model, optimizer = _sharded(
                    bench, config, stage=stage, precision=precision, transport=way
                )
                mine = slice(bench.topology.rank, bench.topology.rank + 1)
                losses = []
                for x, y in samples:
                    loss = float(_train(model, optimizer, x[mine], y[mine]))
                    losses.append(sum(bench.topology.gather(loss)) / size)
                hpczero.release(model)
                first = first or losses
                pairs = zip(losses, expected, strict=True)
                yield {
                    "precision": precision,
                    "stage": stage,
                    "way": way,
                    "bits_equal": losses == first,
                    "largest_relative_difference": max(abs(a - b) / abs(b) for a, b in pairs),
                }


def speed(bench: Bench) -> Iterator[Row]:
    """One rank: hpczero beside plain torch, the same network in bf16 with fp32 masters, in turns."""
    device = bench.accelerator.device
    for name, config, sequences in bench.sizes.models:
        x, y = _tokens(config, sequences, 0, device)
        found: dict[str, list[float]] = {}
        memory: dict[str, int] = {}
        planned = 0
        for way in ("plain", "hpczero", "plain", "hpczero"):
            _forget(bench)
            bench.accelerator.reset_peak()
            step: Callable[[], object]
            if way == "plain":
                step = _plain_step(config, device, x, y)
                planned_now = 0
            else:
                model, optimizer = _sharded(bench, config, quickly=True, stage=3, precision="bf16")
                planned_now = hpczero.sharding(model).plan.memory().states

                step = partial(_train, model, optimizer, x, y)

            for _ in range(WARM_UP):
                step()
            found.setdefault(way, []).extend(bench.seconds(step, TIMED))
            memory[way] = bench.accelerator.usage().get("allocated_peak", 0)
            planned = max(planned, planned_now)
            if way == "hpczero":
                hpczero.release(model)
                del model, optimizer
            del step
        median = {way: sorted(times)[len(times) // 2] for way, times in found.items()}
        for way, step_s in median.items():
            yield {
                "model": name,
                "way": way,
                "step_ms": step_s * 1e3,
                "tokens_per_s": tokens_per_s(config, sequences, step_s),
                "tflops": tflops(config, sequences, step_s),
                "of_plain": median["plain"] / step_s,
                "peak_nbytes": memory[way],
                "planned_states_nbytes": planned if way == "hpczero" else None,
                "all_ms": [1e3 * s for s in found[way]],
            }


def _plain_step(
    config: GPTConfig, device: torch.device, x: Tensor, y: Tensor
) -> Callable[[], None]:
    """bf16 parameters, fp32 masters, stock fused AdamW: what a careful user writes by hand."""
    with torch.device("meta"):
        model = GPT(config)
    model = model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            _fill(parameter.data)
    masters: list[Tensor] = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    model = model.to(torch.bfloat16)
    parameters: list[Tensor] = list(model.parameters())
    optimizer = torch.optim.AdamW(masters, lr=1e-3, eps=1e-3, fused=True)

    def step() -> None:
        loss = model(x, y)
        loss.backward()
        with torch.no_grad():
            for master, parameter in zip(masters, parameters, strict=True):
                assert parameter.grad is not None, "used"
                master.grad = parameter.grad.float()
                parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)

    return step


def overlap(bench: Bench) -> Iterator[Row]:
    """How much of the time that communication takes one after the other is left when it goes on beside the computation.

    Both against steps in which every rank is alone with itself, all at once on the shared device: no communication.
    """
    from hpczero.topology import Topology

    config, sequences = bench.sizes.large
    x, y = _tokens(config, sequences, bench.topology.rank, bench.accelerator.device)
    median: dict[str, float] = {}
    alone = Topology.alone()
    ways: dict[str, dict[str, Any]] = {
        "alone": {"topology": alone},
        "one after the other": {"overlap": False, "transport": "ipc"},
        "beside": {"overlap": True, "transport": "ipc"},
    }
    for way, options in ways.items():
        _forget(bench)
        model, optimizer = _sharded(
            bench, config, quickly=True, stage=3, precision="bf16", **options
        )
        step = partial(_train, model, optimizer, x, y)
        for _ in range(WARM_UP):
            step()
        took = bench.seconds(step, TIMED)
        hpczero.release(model)
        median[way] = sorted(took)[len(took) // 2]
        serial = median.get("one after the other", 0.0) - median["alone"]
        yield {
            "way": way,
            "step_ms": median[way] * 1e3,
            "all_ms": [1e3 * s for s in took],
            "exposed": (median[way] - median["alone"]) / serial if serial > 0 else None,
        }
        del model, optimizer, step
    alone.free()


def fits(bench: Bench, stage: int = 3) -> Iterator[Row]:
    """A model whose states do not fit one rank's share of memory at stage 0 trains at stage 3; memory capped."""
    config, sequences = bench.sizes.large
    sequences = 1 if not bench.twin else sequences
    x, y = _tokens(config, sequences, bench.topology.rank, bench.accelerator.device)
    with torch.device("meta"):
        numel = sum(p.numel() for p in GPT(config).parameters())
    share = int(
        16 * numel * 0.9
    )  # of bytes; stage 0 needs 16 for each parameter, before activations
    total = bench.accelerator.usage().get("total", 0)
    if total:
        torch.cuda.set_per_process_memory_fraction(share / total, bench.accelerator.device)
    problem = ""
    try:
        model, optimizer = _sharded(bench, config, quickly=True, stage=stage, precision="bf16")
        _train(model, optimizer, x, y)
        bench.accelerator.finish()
    except (torch.OutOfMemoryError, hpczero.HpcZeroError) as error:
        problem = str(error).splitlines()[0]
    yield {
        "stage": stage,
        "cap_nbytes": share if total else None,
        "trains": not problem,
        "said": problem,
    }
    if not problem:
        hpczero.release(model)


TRAINING: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "parity": parity,
    "speed": speed,
    "overlap": overlap,
    "fits": fits,
    "fits_not": partial(fits, stage=0),
}
