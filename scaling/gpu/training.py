"""Training checks on one device that ranks share: parity, speed beside plain torch, memory, overlap, a model that fits.

Owns: what each check trains. Must not know: limits, goals. See ``scaling.gpu.checks``, which runs them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

import hpczero
from hpczero.errors import CommError, HpcZeroError
from hpczero.models import GPT, GPTConfig
from hpczero.models.config import parameter_count
from scaling.evidence.record import Row
from scaling.gpu.bench import Bench, tflops, tokens_per_s

STEPS = 4
WARM_UP = 3
TIMED = 8
STAGES = (0, 3)
CAPPED_STEPS = 2  # the second beside the optimizer's state
TILE_NUMEL = 2**20


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


def _attempted(
    bench: Bench, config: GPTConfig, **options: Any
) -> tuple[tuple[nn.Module, Any] | None, str]:
    """``_sharded``, or None and what all ranks said where that way does not work here."""
    try:
        return _sharded(bench, config, **options), ""
    except CommError as error:
        return None, bench.survived(error)


def _fill(tensor: Tensor) -> None:
    """The same million small random numbers again and again."""
    flat, tile = tensor.view(-1), _tile(tensor.device)
    for start in range(0, flat.numel(), len(tile)):
        piece = flat[start : start + len(tile)]
        piece.copy_(tile[: len(piece)])


@cache
def _tile(device: torch.device) -> Tensor:
    """Drawn once: a large network has hundreds of parameters."""
    generator = torch.Generator().manual_seed(0)
    return (0.02 * torch.randn(TILE_NUMEL, generator=generator)).to(device)


def _train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss: Tensor = model(x, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def forget(bench: Bench) -> None:
    """Give back what nobody uses any more."""
    gc.collect()
    if not bench.accelerator.is_host:
        torch.cuda.empty_cache()


def parity(bench: Bench) -> Iterator[Row]:
    """Stages and transports against each other, bit by bit, and against one plain torch process, in fp32.

    Also in bf16 with 1,024 tokens, where fused attention could add in another order every time: this check runs with
    deterministic operations alone.
    """
    # Peers' memory last: it is what may not work, or take the job with it.
    ways = ["flat", "hierarchical", "ipc"] if bench.topology.size > 1 else ["flat"]
    tiny, long = (_Alike(bench, config) for config in (bench.sizes.tiny, bench.sizes.long))
    for way in ways:
        cases = [*product([tiny], ("fp32", "bf16"), range(4)), *product([long], ("bf16",), STAGES)]
        for alike, precision, stage in cases:
            row = alike.row(way, precision, stage)
            yield row
            if row.get("said"):
                break


class _Alike:
    """One network trained in every way on the same samples: the losses of each way, and of plain torch."""

    def __init__(self, bench: Bench, config: GPTConfig) -> None:
        self._bench, self._config = bench, config
        device, size = bench.accelerator.device, bench.topology.size
        self._samples = [_tokens(config, size, step, device) for step in range(STEPS)]
        plain = _built(config).to(device)
        optimizer = _adamw(plain)
        self._plain = [float(_train(plain, optimizer, x, y)) for x, y in self._samples]
        self._first: dict[str, list[float]] = {}

    def row(self, way: str, precision: str, stage: int) -> Row:
        """Train so, and compare. Collective; ``said`` alone where that way does not work here."""
        topology = self._bench.topology
        what = {"tokens": self._config.context, "precision": precision, "stage": stage, "way": way}
        options = {"stage": stage, "precision": precision, "transport": way}
        built, said = _attempted(self._bench, self._config, **options)
        if built is None:
            return {**what, "said": said}
        model, optimizer = built
        mine = slice(topology.rank, topology.rank + 1)
        losses = []
        for x, y in self._samples:
            loss = float(_train(model, optimizer, x[mine], y[mine]))
            losses.append(sum(topology.gather(loss)) / topology.size)
        hpczero.release(model)
        pairs = zip(losses, self._plain, strict=True)
        return {
            **what,
            "bits_equal": losses == self._first.setdefault(precision, losses),
            "largest_relative_difference": max(abs(a - b) / abs(b) for a, b in pairs),
        }


def speed(bench: Bench) -> Iterator[Row]:
    """One rank: hpczero beside plain torch, the same network in bf16 with fp32 masters, in turns.

    At the stage that keeps parameters whole as plain torch does, and at the one that makes each of them anew for
    forward and backward.
    """
    device = bench.accelerator.device
    for name, config, sequences in bench.sizes.models:
        x, y = _tokens(config, sequences, 0, device)
        found: dict[int | None, list[float]] = {}
        memory: dict[int | None, int] = {}
        planned: dict[int | None, int] = {}
        activations = _activations_nbytes(bench, config, x, y)
        for stage in 2 * (None, *STAGES):
            forget(bench)
            bench.accelerator.reset_peak()
            step: Callable[[], object]
            model = None
            if stage is None:
                step = _plain_step(config, device, x, y)
            else:
                model, optimizer = _sharded(
                    bench, config, quickly=True, stage=stage, precision="bf16"
                )
                sharded = hpczero.sharding(model)
                planned[stage] = sharded.plan.memory(footprint=sharded.collectives.footprint).total
                step = partial(_train, model, optimizer, x, y)
                del optimizer, sharded
            for _ in range(WARM_UP):
                step()
            found.setdefault(stage, []).extend(bench.seconds(step, TIMED))
            memory[stage] = bench.accelerator.usage().get("allocated_peak", 0)
            if model is not None:
                hpczero.release(model)
            del step, model
        median = {stage: sorted(times)[len(times) // 2] for stage, times in found.items()}
        for stage, step_s in median.items():
            row = {
                "model": name,
                "way": "plain" if stage is None else "hpczero",
                "stage": stage,
                "step_ms": step_s * 1e3,
                "tokens_per_s": tokens_per_s(config, sequences, step_s),
                "tflops": tflops(config, sequences, step_s),
                "of_plain": median[None] / step_s,
                "peak_nbytes": memory[stage],
                "all_ms": [1e3 * s for s in found[stage]],
            }
            if stage is not None:
                row["planned_nbytes"] = planned[stage]
                row["activations_nbytes"] = activations
            yield row


def _activations_nbytes(bench: Bench, config: GPTConfig, x: Tensor, y: Tensor) -> int:
    """What one forward and backward of the plain network in bf16 takes at most beyond its parameters; 0 on the host."""
    forget(bench)
    model = plain_model(config, bench.accelerator.device).to(torch.bfloat16)
    found = 0
    for _ in range(2):  # the first also takes what libraries keep
        before = bench.accelerator.usage().get("allocated", 0)
        bench.accelerator.reset_peak()
        model(x, y).backward()
        found = bench.accelerator.usage().get("allocated_peak", 0) - before
        model.zero_grad()
    return found


def plain_model(config: GPTConfig, device: torch.device) -> GPT:
    """What the baseline trains, in fp32: as many parameters as ours has."""
    with torch.device("meta"):
        model = GPT(config)
    model = model.to_empty(device=device)
    if config.tie_embeddings:
        model.lm_head.weight = model.wte.weight  # to_empty has given each its own
    numel, expected = sum(p.numel() for p in model.parameters()), parameter_count(config)
    assert numel == expected, f"plain torch would train {numel:,} parameters, not {expected:,}"
    with torch.no_grad():
        for parameter in model.parameters():
            _fill(parameter.data)
    return model


def _plain_step(
    config: GPTConfig, device: torch.device, x: Tensor, y: Tensor
) -> Callable[[], None]:
    """bf16 parameters, fp32 masters, stock fused AdamW: what a careful user writes by hand."""
    model = plain_model(config, device)
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


def step_of(
    bench: Bench, config: GPTConfig, sequences: int, stage: int | None
) -> tuple[nn.Module | None, Callable[[], object]]:
    """One step in bf16 on one batch, by hpczero at ``stage`` with the model to release, or by plain torch."""
    x, y = _tokens(config, sequences, 0, bench.accelerator.device)
    if stage is None:
        return None, _plain_step(config, bench.accelerator.device, x, y)
    model, optimizer = _sharded(bench, config, quickly=True, stage=stage, precision="bf16")
    return model, partial(_train, model, optimizer, x, y)


def overlap(bench: Bench) -> Iterator[Row]:
    """How much of the time that communication takes one after the other is left when it goes on beside the computation.

    Both against steps in which every rank is alone with itself, all at once on the shared device: no communication.
    """
    from hpczero.job.topology import Topology

    config, sequences = bench.sizes.large
    x, y = _tokens(config, sequences, bench.topology.rank, bench.accelerator.device)
    median: dict[str, float] = {}
    alone = Topology.alone()
    transport = "ipc"
    # The one that matters first: a rest of time may not do for all.
    for way in ("alone", "beside", "one after the other"):
        forget(bench)
        given: dict[str, Any] = {"quickly": True, "stage": 3, "precision": "bf16"}
        if way == "alone":
            given["topology"] = alone
        else:
            given.update(transport=transport, overlap=way == "beside")
        built, said = _attempted(bench, config, **given)
        if built is None:
            yield {"way": f"{way}, {transport}", "said": said}
            given["transport"] = transport = "hierarchical"
            built = _sharded(bench, config, **given)
        model, optimizer = built
        step = partial(_train, model, optimizer, x, y)
        for _ in range(WARM_UP):
            step()
        took = bench.seconds(step, TIMED)
        hpczero.release(model)
        median[way] = sorted(took)[len(took) // 2]
        yield {
            "way": way,
            "transport": "" if way == "alone" else transport,
            "step_ms": median[way] * 1e3,
            "of_alone": median[way] / median["alone"],
            "exposed": _exposed(median),
            "time_sliced": bench.time_sliced,
            "all_ms": [1e3 * s for s in took],
        }
        del built, model, optimizer, step
    alone.free()


def _exposed(median: dict[str, float]) -> float | None:
    """Share of the serial communication's time that is left beside the computation; None until all are measured."""
    serial = median.get("one after the other", 0.0) - median["alone"]
    return (median["beside"] - median["alone"]) / serial if serial > 0 else None


def fits(bench: Bench, stage: int = 3) -> Iterator[Row]:
    """A model whose states do not fit one rank's share of memory at stage 0 trains at stage 3; memory capped."""
    config, sequences = bench.sizes.capped
    x, y = _tokens(config, sequences, bench.topology.rank, bench.accelerator.device)
    share = int(16 * parameter_count(config) * 0.9)  # stage 0 needs 16 bytes each, and activations
    bench.cap(share)
    row: Row = {"stage": stage, "cap_nbytes": share}
    # Flat: nothing of it in memory that the cap does not count, shared or exported.
    given: dict[str, Any] = {"stage": stage, "precision": "bf16", "transport": "flat"}
    try:
        model, optimizer = _sharded(bench, config, quickly=True, **given)
        for _ in range(CAPPED_STEPS):
            _train(model, optimizer, x, y)
        bench.accelerator.finish()
        bench.topology.barrier()  # on all ranks
    except (MemoryError, RuntimeError, HpcZeroError) as error:
        if not _of_memory(error):
            raise
        # In the middle of a step, and the others at another place in it.
        bench.leave_alone({**row, "trains": False, "said": str(error).partition("\n")[0]})
    yield {**row, "trains": True, "said": ""}
    hpczero.release(model)


def _of_memory(error: Exception) -> bool:
    """Torch has a class of errors for devices only; of another rank's there is the text alone."""
    known = ("can't allocate memory", "out of memory", "MemoryError", "ALLOC_FAILED")
    of_class = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return of_class or any(words in str(error) for words in known)


TRAINING: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "parity": parity,
    "speed": speed,
    "overlap": overlap,
    "fits": fits,
    "fits_not": partial(fits, stage=0),
}
