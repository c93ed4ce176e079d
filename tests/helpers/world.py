"""World: the ranks of a test with a topology over them, and what they do and judge together.

Must not know: what any test looks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import hpczero
from hpczero.errors import HpcZeroError, StepError
from tests.helpers import small_models
from tests.helpers.parallel import on_root, parallel_assert
from tests.helpers.small_models import Loss

if TYPE_CHECKING:  # importing MPI would start it where tests are only collected
    import pytest
    from mpi4py import MPI

    from hpczero import Topology
    from hpczero.models import GPT


class World:
    """All ranks of the run, which enter a test together. Every method is collective."""

    def __init__(self, comm: MPI.Intracomm, topology: Topology, folder: Path | None = None) -> None:
        self.comm, self.topology, self._folder = comm, topology, folder
        self.rank, self.size = comm.rank, comm.size
        self.own = range(self.rank, self.rank + 1)  # this rank alone, for loops over ranks

    @property
    def folder(self) -> Path:
        """Empty when the test begins, and the same on all ranks."""
        assert self._folder is not None, "only the fixture ``world`` has one"
        return self._folder

    def check(self, condition: object, message: object = "") -> None:
        """Fail on every rank if ``condition`` is false on any."""
        __tracebackhide__ = True
        parallel_assert(self.comm, condition, str(message))

    def raises(
        self,
        kind: type[Exception],
        pattern: str,
        call: Callable[..., object],
        *args: Any,
        **options: Any,
    ) -> str:
        """``call`` raises ``kind`` with a message like ``pattern`` on every rank, agreed; returns this rank's."""
        __tracebackhide__ = True
        return small_models.raises_on_all(self.comm, kind, pattern, call, *args, **options)

    def on_root(self, call: Callable[..., object], *args: Any, **options: Any) -> None:
        """``call`` on rank 0 alone, before any rank goes on; where it fails, the test fails on all ranks."""
        __tracebackhide__ = True
        on_root(self.comm, call, *args, **options)

    def zeroified(
        self, model: nn.Module, optimizer: Any, **options: Any
    ) -> AbstractContextManager[hpczero.Sharding]:
        """``model`` is sharded over this topology inside, and released afterwards."""
        return small_models.zeroified(model, optimizer, **{"topology": self.topology, **options})

    @contextmanager
    def mlp(
        self, make: Callable[[small_models.MLP], Any] | None, **options: Any
    ) -> Iterator[tuple[small_models.MLP, Any]]:
        """An ``MLP`` with the optimizer that ``make`` makes, if it is given, sharded inside."""
        model = small_models.MLP()
        optimizer = None if make is None else make(model)
        with self.zeroified(model, optimizer, **options):
            yield model, optimizer

    @contextmanager
    def gpt(
        self, sizes: Mapping[str, Any] | None = None, **options: Any
    ) -> Iterator[tuple[GPT, Any, hpczero.Sharding]]:
        """A tiny GPT with AdamW, sharded inside."""
        model = small_models.tiny_gpt(**(sizes or {}))
        optimizer = small_models.adamw(model)
        with self.zeroified(model, optimizer, **options) as sharding:
            yield model, optimizer, sharding

    def refuses(
        self,
        kind: type[HpcZeroError],
        pattern: str,
        model: nn.Module,
        optimizer: Any,
        **options: Any,
    ) -> None:
        """``zeroify`` refuses it on all ranks, and leaves model and optimizer as they were."""
        __tracebackhide__ = True
        before = _identity(model, optimizer)
        options = {"topology": self.topology, **options}
        self.raises(kind, pattern, lambda: hpczero.zeroify(model, optimizer, **options))
        same = _identity(model, optimizer) == before
        self.check(same, "the model or the optimizer was changed")

    def check_told(self, caplog: pytest.LogCaptureFixture, words: str, times: int = 1) -> None:
        """Rank 0, and no other one, has logged a line with these words, so often."""
        __tracebackhide__ = True
        told = sum(words in record.getMessage() for record in caplog.records)
        self.check(told == (times if self.rank == 0 else 0), caplog.text)

    def backward(self, model: nn.Module, plain: nn.Module, loss: Loss) -> None:
        """Of the mean over all ranks: in shards of this rank's ``loss``, in plain torch of everybody's."""
        loss(model, self.rank).backward()
        for rank in range(self.size):
            (loss(plain, rank) / self.size).backward()

    def check_gradients(self, model: nn.Module, plain: nn.Module, *, within: float = 1e-6) -> None:
        """The mean gradients are those of ``plain``, and zero where it has none."""
        __tracebackhide__ = True
        for name, found in hpczero.full_gradients(model).items():
            expected = plain.get_parameter(name).grad
            expected = torch.zeros_like(found) if expected is None else expected
            self.check(torch.allclose(found, expected, rtol=1e-5, atol=within), name)

    def refuses_step(self, model: nn.Module, optimizer: Any, pattern: str) -> None:
        """``optimizer.step`` is a StepError on all ranks, and changes no value."""
        __tracebackhide__ = True
        sharding = hpczero.sharding(model)
        before = small_models.values(sharding)
        self.raises(StepError, pattern, optimizer.step)
        self.check(small_models.same(small_models.values(sharding), before), "other values")

    def check_weights(self, model: nn.Module, plain: nn.Module, *, within: float) -> None:
        """The parameters are those of ``plain``, which was trained in one process."""
        __tracebackhide__ = True
        small_models.check_weights(self.comm, model, plain, within=within)

    def check_trains(
        self, model: nn.Module, optimizer: Any, plain: nn.Module | None = None
    ) -> None:
        """After whatever happened, a step equals one of a plain copy."""
        __tracebackhide__ = True
        small_models.check_trains(self.comm, model, optimizer, plain)

    def check_state(
        self, found: dict[str, Tensor] | None, expected: dict[str, Tensor] | None
    ) -> None:
        """Two ``full_state_dict``, which are on rank 0, are equal in every bit."""
        __tracebackhide__ = True
        self.check(small_models.same_state(found, expected), "other bits")


@contextmanager
def on_nodes(comm: MPI.Intracomm, nodes: Sequence[int] | None, **options: Any) -> Iterator[World]:
    """All ranks over a topology of these nodes, one number for each rank."""
    topology = hpczero.Topology.create(comm, nodes, **options)
    yield World(comm, topology)
    topology.free()


def _identity(model: nn.Module, optimizer: Any) -> list[Any]:
    """Which objects and which memory they consist of, and how many hooks they carry."""
    parameters = [(name, id(p), p.data_ptr()) for name, p in model.named_parameters()]
    stepped = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    return [parameters, stepped, hooks]
