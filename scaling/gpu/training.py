"""Training on one device that ranks share: the checks ``parity``, ``overlap`` and ``fits``; see ``checks``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn

import hpczero
from hpczero.errors import CommError, HpcZeroError
from hpczero.models import GPT, GPTConfig
from hpczero.models.config import parameter_count
from scaling.evidence.record import Row
from scaling.gpu.bench import Bench, Values, adamw, forget, sharded, tokens, train

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
