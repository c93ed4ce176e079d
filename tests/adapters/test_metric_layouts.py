"""An adapter's metric where ranks share the layers or the tokens of a model: that of plain torch in one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from hpczero.adapters.gpt import GPTAdapter
from hpczero.errors import ConfigError
from hpczero.models.config import GPTConfig
from hpczero.options.config import LayoutOptions
from hpczero.run.starting.reading import Rows
from tests.adapters.equal import check_losses, sharded_run
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import raises_on_all
from tests.parallel.layouts import laid_out

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = pytest.mark.mpi
SMALL = GPTConfig(layers=3, hidden=16, heads=2, vocab_size=7, context=8)


class Guessing(GPTAdapter):
    """How often the likeliest token is the right one."""

    metric_name = "accuracy"

    def metric(self, model: nn.Module, *batch: Tensor) -> Tensor:
        tokens, targets = batch
        right: Tensor = (model(tokens).argmax(dim=-1) == targets).float().mean()
        return right


class Twice(Guessing):
    """Needs the model more than once."""

    def metric(self, model: nn.Module, *batch: Tensor) -> Tensor:
        tokens, targets = batch
        right: Tensor = (model(tokens) + model(tokens)).argmax(dim=-1) == targets
        return right.float().mean()


class Inside(Guessing):
    """Needs a part of the model."""

    def metric(self, model: nn.Module, *batch: Tensor) -> Tensor:
        size: Tensor = model.wte.weight.sum()  # type: ignore[union-attr,operator]
        return size


def rows(number: int) -> Any:
    """The next token is the sum of the last two, mostly."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(7, (number, 9), generator=generator)
    for place in range(2, 9):
        tokens[:, place] = (tokens[:, place - 1] + tokens[:, place - 2]) % 7
    return Rows((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), "tokens")


LAYOUTS = [
    pytest.param({"pipeline": 2}, marks=pytest.mark.ranks(2)),
    pytest.param({"context": 2}, marks=pytest.mark.ranks(2)),
    pytest.param({"tensor": 2}, marks=pytest.mark.ranks(2)),
    pytest.param({"pipeline": 3}, marks=pytest.mark.ranks(3)),
    pytest.param({"pipeline": 2, "tensor": 2}, marks=pytest.mark.ranks(4)),
    pytest.param({"pipeline": 2, "context": 2}, marks=pytest.mark.ranks(4)),
]


@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
def test_metric_is_that_of_plain_torch(comm: MPI.Intracomm, degrees: dict[str, Any]) -> None:
    with laid_out(comm, LayoutOptions(**degrees)) as topology:
        found = check_losses(topology, Guessing(SMALL), rows(60), rows(20), **degrees)
    parallel_assert(comm, 0.1 < found[-1] < 1, f"a metric that says something: {found[-1]}")


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("kind", "said"), [(Twice, "the model is called twice"), (Inside, "AttributeError: .*'wte'")]
)
def test_metric_that_needs_other_stages_is_refused_on_every_rank(
    comm: MPI.Intracomm, kind: type[Guessing], said: str
) -> None:
    said = rf"{kind.__name__}.metric: with parallel.pipeline above 1 it may call model\(inputs\) once.*{said}"
    with laid_out(comm, LayoutOptions(pipeline=2)) as topology:
        given = kind(SMALL), rows(60), rows(20), topology
        raises_on_all(comm, ConfigError, said, sharded_run, *given, pipeline=2)
