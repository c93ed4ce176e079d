"""What the tests of cut models share: groups of tensor ranks, and the whole model's gradients out of those of parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from hpczero.job.mesh import Mesh
from hpczero.job.topology import Topology
from hpczero.models import GPTConfig
from hpczero.parallel import Rule, close, split
from hpczero.plan.placement import ModelPart, part_of
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import grad

if TYPE_CHECKING:
    from mpi4py import MPI

M = TypeVar("M", bound=nn.Module)


@contextmanager
def tensor_ranks(comm: MPI.Intracomm, **degrees: int) -> Iterator[Topology]:
    """All ranks share each layer, or the degrees that are given."""
    degrees = degrees or {"tensor": comm.size}
    topology = Topology.create(comm, mesh=Mesh.of(comm.size, **degrees))
    yield topology
    topology.free()


@contextmanager
def split_over(
    comm: MPI.Intracomm, model: M, rule: Rule, *, sequence: bool = False, **degrees: int
) -> Iterator[M]:
    """``model`` with its layers cut over all ranks, or over the degrees that are given. Collective."""
    with tensor_ranks(comm, **degrees) as topology:
        split(model, topology, rule, sequence=sequence)
        yield model
        close(model)


def randomize(model: M, *, deviation: float = 0.2, seed: int = 1) -> M:
    """Give it values at which everything has a gradient."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, deviation, generator=generator)
    return model


def tokens_and_targets(config: GPTConfig, seq_len: int = 13) -> tuple[Tensor, Tensor]:
    """(2, seq_len) of each."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(config.vocab_size, (2, seq_len + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def part(model: nn.Module) -> ModelPart:
    found = part_of(model)
    assert found is not None, "the model was split"
    return found


def whole_values(comm: MPI.Intracomm, model: nn.Module, *, gradients: bool) -> dict[str, Tensor]:
    """Parameters of the whole model, or their gradients, each put together from what counts on each rank. Collective.

    Gradients that are partial sums are summed here, by NumPy.
    """
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        placement = part(model).placements[name]
        own = grad(parameter) if gradients else parameter.detach()
        assert tuple(own.shape) == placement.local_shape, name
        rows = comm.allgather((placement, own.float().numpy()))
        whole = np.full(placement.shape, np.nan, dtype=np.float32)
        if placement.partial and gradients:
            whole = np.sum([row for _, row in rows], axis=0, dtype=np.float32)
        else:
            for other, row in rows:
                if other.counted:
                    other.put(row, whole)
        found[placement.name] = torch.from_numpy(whole)
    return found


def padding_is_zero(model: nn.Module, *, gradients: bool) -> bool:
    """Whether elements that the whole model has not are zero in every bit, or at least of both signs."""
    for name, parameter in model.named_parameters():
        placement = part(model).placements[name]
        own = grad(parameter) if gradients else parameter.detach()
        left, kept = own.clone(), torch.zeros(placement.shape)
        placement.take(torch.zeros(placement.shape), kept_own := torch.zeros(placement.local_shape))
        placement.put(own, kept)
        placement.take(kept, kept_own)
        if not torch.equal(left, kept_own):
            return False
    return True


def check_gradients(comm: MPI.Intracomm, model: nn.Module, plain: nn.Module) -> None:
    """Those of a model whose layers are cut are those of ``plain``. Collective."""
    for name, gradient in whole_values(comm, model, gradients=True).items():
        worst = off(gradient, grad(plain.get_parameter(name)))
        parallel_assert(comm, worst < 3e-6, f"{name}: {worst}")


def equal_on_all(comm: MPI.Intracomm, tensor: Tensor) -> bool:
    """Whether all ranks have the same bits. Collective."""
    return len(set(comm.allgather(tensor.detach().contiguous().numpy().tobytes()))) == 1


def off(found: Tensor, wanted: Tensor) -> float:
    """Largest difference, relative to the largest element that is wanted."""
    scale = float(wanted.detach().abs().max()) if wanted.numel() else 1.0
    worst = float((found.detach() - wanted.detach()).abs().max()) if wanted.numel() else 0.0
    return worst / max(scale, 1e-30)
