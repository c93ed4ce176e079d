"""Training on one device: the checks ``parity``, ``overlap``, ``fits``, ``speed`` and ``trace``; see ``checks``.

``speed`` trains one GPT on one rank by plain torch, by hpczero at stages 3 and 0, and by FSDP2 over NCCL, then again
with compiled blocks. A row is printed as soon as a way is measured. ``trace`` says how long the device is idle in a
step, and between which kernels.
"""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

import hpczero
from hpczero.errors import CommError, HpcZeroError
from hpczero.models import GPT, GPTConfig
from hpczero.models.config import flops_per_token, parameter_count
from scaling.evidence.record import Row
from scaling.gpu.bench import Bench, Values, adamw, compile_blocks, forget, sharded, tokens, train

STEPS = 4
WARM_UP = 3
TIMED = 8
STAGES = (0, 3)
CAPPED_STEPS = 2  # the second beside the optimizer's state
CAPPED_SHARE = 0.9  # of what stage 0 takes: 16 bytes for each parameter, and activations


def _attempted(
    bench: Bench, config: GPTConfig, **options: Any
) -> tuple[tuple[nn.Module, Any] | None, str]:
    """``sharded``, or None and what all ranks said where that way does not work here."""
    try:
        return sharded(bench, config, **options), ""
    except CommError as error:
        return None, bench.survived(error)


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
        self._samples = [tokens(config, size, step, device) for step in range(STEPS)]
        plain = GPT(config)
        plain.initialize_all(seed=0)
        plain.to(device)
        optimizer = adamw(plain)
        self._plain = [float(train(plain, optimizer, x, y)) for x, y in self._samples]
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
            loss = float(train(model, optimizer, x[mine], y[mine]))
            losses.append(sum(topology.gather(loss)) / topology.size)
        hpczero.release(model)
        pairs = zip(losses, self._plain, strict=True)
        return {
            **what,
            "bits_equal": losses == self._first.setdefault(precision, losses),
            "largest_relative_difference": max(abs(a - b) / abs(b) for a, b in pairs),
        }


def overlap(bench: Bench) -> Iterator[Row]:
    """How much of the time that communication takes one after the other is left when it goes on beside the computation.

    Both against steps in which every rank is alone with itself, all at once on the shared device: no communication.
    """
    from hpczero.job.topology import Topology

    config, sequences = bench.sizes.large
    x, y = tokens(config, sequences, bench.topology.rank, bench.accelerator.device)
    median: dict[str, float] = {}
    alone = Topology.alone()
    transport = "ipc"
    # The one that matters first: a rest of time may not do for all.
    for way in ("alone", "beside", "one after the other"):
        forget(bench)
        given: dict[str, Any] = {"initialize": Values(), "stage": 3, "precision": "bf16"}
        if way == "alone":
            given["topology"] = alone
        else:
            given.update(transport=transport, overlap=way == "beside")
        built, said = _attempted(bench, config, **given)
        if built is None:
            yield {"way": f"{way}, {transport}", "said": said}
            given["transport"] = transport = "hierarchical"
            built = sharded(bench, config, **given)
        model, optimizer = built
        step = partial(train, model, optimizer, x, y)
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
    x, y = tokens(config, sequences, bench.topology.rank, bench.accelerator.device)
    share = int(CAPPED_SHARE * 16 * parameter_count(config))
    bench.cap(share)
    row: Row = {"stage": stage, "cap_nbytes": share}
    # Flat: nothing of it in memory that the cap does not count, shared or exported.
    given: dict[str, Any] = {"stage": stage, "precision": "bf16", "transport": "flat"}
    try:
        model, optimizer = sharded(bench, config, Values(), **given)
        for _ in range(CAPPED_STEPS):
            train(model, optimizer, x, y)
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


TRACED_STEPS = 3
LARGEST = 12  # gaps that are told
PLAIN, FSDP2 = "plain torch", "FSDP2"
WAYS: dict[str, int | None] = {
    PLAIN: None,
    "hpczero, stage 3": 3,
    "hpczero, stage 0": 0,
    FSDP2: None,
}

Kernel = tuple[float, float, str]  # begin, end in microseconds; name
Step = Callable[[], object]


def speed(bench: Bench, which: str = "") -> Iterator[Row]:
    """One rank in bf16 with fp32 masters, fused AdamW; each way twice, in turns; then with compiled blocks.

    Args:
        bench: of one rank.
        which: of the models; the twin has one.
    """
    name, config, sequences = _model(bench, which)
    x, y = tokens(config, sequences, 0, bench.accelerator.device)
    activations = _activations_nbytes(bench, config, x, y)
    first = [*WAYS, PLAIN, "hpczero, stage 3"]
    for way, compiled in [*((w, False) for w in first), *((w, True) for w in WAYS)]:
        what = {"model": name, "way": way, "compiled": compiled}
        forget(bench)
        bench.accelerator.reset_peak()
        model: nn.Module | None = None
        try:
            model, step, more = _made(bench, config, way, x, y, compiled=compiled)
            figures = _measured(bench, config, sequences, step)
        except Exception as error:  # of libraries of all kinds; the other ways may work
            yield {**what, "said": f"{type(error).__name__}: {error}".partition("\n")[0][:300]}
        else:
            yield {**what, **figures, **more, "activations_nbytes": activations}
        if model is not None and WAYS[way] is not None:
            hpczero.release(model)
        model = step = None  # type: ignore[assignment]
        gc.collect()
    if torch.distributed.is_initialized():  # by FSDP2: its threads must not outlive Python
        torch.distributed.destroy_process_group()


def _model(bench: Bench, which: str) -> tuple[str, GPTConfig, int]:
    models = bench.sizes.models
    return next((found for found in models if found[0] == which), models[0])


def _measured(bench: Bench, config: GPTConfig, sequences: int, step: Step) -> Row:
    """Step by step, and without a wait in each step: the host may run ahead, as in training."""
    for _ in range(WARM_UP):
        step()
    took = bench.seconds(step, TIMED)
    start = time.perf_counter()
    for _ in range(TIMED):
        step()
    bench.accelerator.finish()
    ahead_s = (time.perf_counter() - start) / TIMED
    tokens_per_s = sequences * config.context / ahead_s
    return {
        "step_ms": statistics.median(took) * 1e3,
        "step_ms_ahead": ahead_s * 1e3,
        "tokens_per_s": tokens_per_s,
        "tflops": tokens_per_s * flops_per_token(config) / 1e12,  # 6 N + 12 L C T for each token
        "peak_nbytes": bench.accelerator.usage().get("allocated_peak", 0),
        "all_ms": [1e3 * s for s in took],
    }


def _made(
    bench: Bench, config: GPTConfig, way: str, x: Tensor, y: Tensor, *, compiled: bool
) -> tuple[nn.Module, Step, Row]:
    """The model, one training step of it, and what else is known."""
    stage = WAYS[way]
    if stage is not None:
        start = time.perf_counter()
        model, optimizer = sharded(
            bench, config, Values(), compiled=compiled, stage=stage, precision="bf16"
        )
        bench.accelerator.finish()
        state = hpczero.sharding(model)
        planned = state.plan.memory(footprint=state.collectives.footprint).total
        more = {"stage": stage, "planned_nbytes": planned, "zeroify_s": time.perf_counter() - start}
        return model, partial(train, model, optimizer, x, y), more
    model = plain_model(config, bench.accelerator.device)
    if compiled:
        compile_blocks(model)
    if way == PLAIN:
        return model, _plain_step(model, x, y), {}
    return model, *_fsdp2_step(bench, model, x, y)


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
    """What the baselines train, in fp32: as many parameters as ours has."""
    with torch.device("meta"):
        model = GPT(config)
    model = model.to_empty(device=device)
    if config.tie_embeddings:
        model.lm_head.weight = model.wte.weight  # to_empty has given each its own
    numel, expected = sum(p.numel() for p in model.parameters()), parameter_count(config)
    assert numel == expected, f"plain torch would train {numel:,} parameters, not {expected:,}"
    values = Values()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values.fill_range(name, tuple(parameter.shape), 0, parameter.data.view(-1))
    return model


def _plain_step(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    """bf16 parameters, fp32 masters, stock fused AdamW: what a careful user writes by hand."""
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


def _fsdp2_step(bench: Bench, model: GPT, x: Tensor, y: Tensor) -> tuple[Step, Row]:
    """FSDP2 as its users run it: each block a unit, parameters in bf16, gradients reduced in fp32."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    device = bench.accelerator.device
    if not dist.is_initialized():
        # This one process is all there is. NCCL takes no interface but lo by itself, and refuses to start without one.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        rendezvous = f"file://{tempfile.mkdtemp()}/rendezvous"
        options: dict[str, Any] = {} if bench.twin else {"device_id": device}
        backend = "gloo" if bench.twin else "nccl"
        dist.init_process_group(backend, init_method=rendezvous, rank=0, world_size=1, **options)
    mesh = init_device_mesh(device.type, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.blocks, model):
        fully_shard(module, mp_policy=policy, mesh=mesh)
    return partial(train, model, adamw(model), x, y), {"backend": dist.get_backend()}


def trace(bench: Bench, which: str = "") -> Iterator[Row]:
    """The device's idle time in a step by the kernels' own clock, plain torch and hpczero; one rank."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([] if bench.twin else [ProfilerActivity.CUDA])]
    name, config, sequences = _model(bench, which)
    for way in (PLAIN, "hpczero, stage 3", "hpczero, stage 0"):
        forget(bench)
        x, y = tokens(config, sequences, 0, bench.accelerator.device)
        model, step, _ = _made(bench, config, way, x, y, compiled=False)
        for _ in range(TRACED_STEPS + 1):
            step()
        bench.accelerator.finish()
        with profile(activities=activities) as profiler:
            for _ in range(TRACED_STEPS):
                step()
            bench.accelerator.finish()
        for row in idle_rows(_kernels(bench, profiler), TRACED_STEPS):
            yield {"model": name, "way": way, **row}
        if WAYS[way] is not None:
            hpczero.release(model)
        del model, step


def _kernels(bench: Bench, profiler: Any) -> list[Kernel]:
    """What ran on the device; on the twin the operations of the host, of which none is within another."""
    kind = "CPU" if bench.twin else "CUDA"
    return [
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type.name == kind and not (bench.twin and event.cpu_parent is not None)
    ]


def idle_rows(kernels: Sequence[Kernel], steps: int) -> Iterator[Row]:
    """First how long a step took and how much of it nothing ran, then the longest gaps.

    Kernels of several streams may overlap: idle is where none runs.
    """
    in_order = sorted(kernels)
    if not in_order:
        yield {"said": "the profiler has seen nothing on the device"}
        return
    first, end, last = in_order[0]
    gaps: list[tuple[float, str, str]] = []
    for start, stop, name in in_order[1:]:
        if start > end:
            gaps.append((start - end, last, name))
        if stop > end:
            end, last = stop, name
    idle = sum(length for length, _, _ in gaps)
    yield {
        "step_ms": (end - first) / steps / 1e3,
        "idle_ms": idle / steps / 1e3,
        "idle": idle / (end - first),
        "kernels": len(in_order) // steps,
        "median_us": statistics.median(stop - start for start, stop, _ in in_order),
    }
    for length, before, after in sorted(gaps, reverse=True)[:LARGEST]:
        yield {"gap_us": length, "after": before[:60], "before": after[:60]}
