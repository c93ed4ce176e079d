"""Ways in which a cut model is called: a pipeline stage, several nodes, half precision, inference, compiled."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

from hpczero.job.mesh import Mesh
from hpczero.job.topology import Topology
from hpczero.models import GPT, GPTConfig
from hpczero.parallel import Kept, Rule, Split, close, gpt_rule, split
from tests.helpers.parallel import parallel_assert
from tests.parallel.wholes import (
    check_gradients,
    equal_on_all,
    off,
    randomize,
    split_over,
    tokens_and_targets,
)

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2)]

CONFIG = GPTConfig(vocab_size=61, context=16, layers=2, hidden=30, heads=5, ffn_multiple=3)
SEQUENCE = pytest.mark.parametrize("sequence", [False, True], ids=["plain", "sequence"])


def build() -> GPT:
    return randomize(GPT(CONFIG))


def batch() -> tuple[Tensor, Tensor]:
    return tokens_and_targets(CONFIG)


@SEQUENCE
def test_ranks_of_several_nodes_send_messages(comm: MPI.Intracomm, sequence: bool) -> None:
    plain = build()
    wanted = plain(*batch())
    wanted.backward()
    topology = Topology.create(comm, [0, 1], mesh=Mesh.of(2, tensor=2))
    model = split(build(), topology, gpt_rule(CONFIG), sequence=sequence)
    found = model(*batch())
    found.backward()
    parallel_assert(comm, off(found, wanted) < 1e-6)
    check_gradients(comm, model, plain)
    close(model)
    topology.free()


@SEQUENCE
def test_half_precision_is_near_to_the_plain_models_and_equal_on_all_ranks(
    comm: MPI.Intracomm, sequence: bool
) -> None:
    plain = build()
    with split_over(comm, copy.deepcopy(plain), gpt_rule(CONFIG), sequence=sequence) as model:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits, wanted = model(batch()[0]), plain(batch()[0])
            loss, plain_loss = model(*batch()), plain(*batch())
        parallel_assert(comm, logits.dtype == wanted.dtype == torch.bfloat16)
        parallel_assert(comm, off(logits.float(), wanted.float()) < 0.05)
        parallel_assert(comm, off(loss, plain_loss) < 0.01, f"{loss} {plain_loss}")
        loss.backward()
        model.to(torch.bfloat16)
        parallel_assert(comm, equal_on_all(comm, model(*batch())), "bits")


def test_inference_mode_gives_the_same_logits(comm: MPI.Intracomm) -> None:
    with split_over(comm, build(), gpt_rule(CONFIG)) as model:
        with torch.inference_mode():
            first = model(batch()[0])
        parallel_assert(comm, torch.equal(first, model(batch()[0])))
        close(model)
        parallel_assert(comm, torch.equal(first, model(batch()[0])), "after close")


@SEQUENCE
def test_parameters_that_are_not_trained_have_no_gradient(
    comm: MPI.Intracomm, sequence: bool
) -> None:
    plain = build()
    frozen = ("wpe.weight", "blocks.0.attention.qkv.weight", "blocks.1.mlp_norm.weight")
    for name in frozen:
        plain.get_parameter(name).requires_grad_(False)
    with split_over(comm, copy.deepcopy(plain), gpt_rule(CONFIG), sequence=sequence) as model:
        plain(*batch()).backward()
        model(*batch()).backward()
        for name in frozen:
            parallel_assert(comm, model.get_parameter(name).grad is None, name)
            del model.get_submodule(name.rpartition(".")[0])._parameters["weight"]
        check_gradients(comm, model, plain)


class Mixed(nn.Module):
    """Layers where all ranks have all tokens, then ones where each has its own, then all again."""

    def __init__(self) -> None:
        super().__init__()
        self.first_norm, self.last_norm = nn.LayerNorm(6), nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 7), nn.Linear(7, 6)
        self.norm = nn.LayerNorm(6)
        self.second_up, self.second_down = nn.Linear(6, 5), nn.Linear(5, 6)
        self.middle = nn.Sequential(self.norm, self.second_up, nn.Tanh(), self.second_down)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 6) in and out."""
        x = self.down(torch.tanh(self.up(self.first_norm(x))))
        out: Tensor = self.last_norm(self.middle(x))
        return out


@SEQUENCE
def test_layers_where_all_tokens_are_have_the_plain_models_gradients(
    comm: MPI.Intracomm, sequence: bool
) -> None:
    plain, generator = randomize(Mixed(), deviation=0.5), torch.Generator().manual_seed(1)
    x = torch.randn(2, 5, 6, generator=generator)
    weight = torch.randn(2, 5, 6, generator=generator)
    wanted = plain(x)
    (wanted * weight).sum().backward()
    rule = Rule(
        {
            "first_norm": Kept.ALL_TOKENS,
            "up": Split(0, all_tokens=True),
            "down": Split(1, all_tokens=True),
            "norm": Kept.STREAM,
            "second_up": Split(0),
            "second_down": Split(1),
            "middle.0": Kept.STREAM,
            "middle.1": Split(0),
            "middle.3": Split(1),
            "last_norm": Kept.ALL_TOKENS,
        },
        cut_before=("middle",),
        join_after=("middle",),
    )
    whole = copy.deepcopy(plain)
    whole.zero_grad()
    with split_over(comm, whole, rule, sequence=sequence) as model:
        found = model(x)
        (found * weight).sum().backward()
        parallel_assert(comm, off(found, wanted) < 1e-6, "output")
        check_gradients(comm, model, plain)


@pytest.mark.slow
@pytest.mark.fresh
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@SEQUENCE
def test_a_compiled_model_exchanges_in_every_call(comm: MPI.Intracomm, sequence: bool) -> None:
    with split_over(comm, build(), gpt_rule(CONFIG), sequence=sequence) as model:
        compiled = torch.compile(model, backend="eager")
        for _ in range(3):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.01)
            loss, wanted = compiled(*batch()), model(*batch())
            parallel_assert(comm, off(loss, wanted) < 1e-6)
            grads = [torch.autograd.grad(x, list(model.parameters())) for x in (loss, wanted)]
            same = all(off(a, b) < 1e-5 for a, b in zip(*grads, strict=True))
            parallel_assert(comm, same, "gradients")
    torch._dynamo.reset()  # what it keeps would stay for the tests that follow
