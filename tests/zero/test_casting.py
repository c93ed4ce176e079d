"""At the model's boundary in half precision: whose tensors are cast, and what the loss scale reaches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hpczero
from hpczero.errors import StepError
from hpczero.plan.precision import LossScale, Precision
from tests.helpers.small_models import MLP, adamw, mlp_input
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2)]

FP16 = Precision(param="fp16", loss_scale=LossScale(initial=64.0))


class FromBatch(MLP):
    """Takes a batch, adds what it found, returns nothing that needs a gradient."""

    def forward(self, batch: dict[str, Any]) -> Any:  # type: ignore[override]
        assert batch["x"].dtype is not torch.float32
        batch["moved"] = batch.pop("given")
        batch["logits"] = super().forward(batch["x"])
        batch["seen"].append(batch["logits"].square().mean())
        return None


@pytest.mark.parametrize("precision", ["bf16", FP16], ids=["bf16", "fp16"])
def test_a_batch_stays_the_callers_and_keeps_what_the_model_adds(world: World, precision):
    model = FromBatch()
    with world.zeroified(model, adamw(model), stage=3, precision=precision):
        x = mlp_input(world.rank)
        given = x.clone().requires_grad_() * 1.0
        batch: dict[str, Any] = {"x": x, "given": given, "seen": []}
        model(batch)
        world.check(batch["moved"] is given)
        world.check(batch["x"] is x and x.dtype is torch.float32)
        world.check(batch["logits"].dtype is torch.float32)
        (batch["logits"].sum() + batch["seen"][0]).backward()
        world.check(hpczero.clip_grad_norm_(model, 1e9) > 0)


class InPlace(MLP):
    def forward(self, x: Tensor) -> Tensor:
        x += 1.0
        return super().forward(x)


def test_a_change_of_a_cast_argument_is_refused(world: World):
    model = InPlace()
    with world.zeroified(model, adamw(model), stage=3, precision="bf16"):
        with pytest.raises(StepError, match="changed a tensor among its arguments in place"):
            model(mlp_input(world.rank))
        model.zero_grad()


def test_the_gradient_of_an_input_has_no_loss_scale(world: World):
    plain = MLP()
    x = mlp_input(world.rank).requires_grad_()
    plain(x).square().mean().backward()
    expected, x.grad = x.grad, None
    with world.mlp(adamw, stage=3, precision=FP16) as (model, _):
        model(x).square().mean().backward()
        assert x.grad is not None
        assert expected is not None
        close = torch.allclose(x.grad, expected, rtol=0.02, atol=2e-3 * float(expected.abs().max()))
        world.check(close, f"{x.grad} instead of {expected}")


class Beside(MLP):
    """Returns a loss, or leaves it on itself."""

    def __init__(self, *, returned: bool) -> None:
        super().__init__()
        self.returned = returned
        self.beside: Tensor | None = None
        self.router = nn.Linear(7, 4)
        with torch.no_grad():
            self.router.weight.fill_(0.3)
            self.router.bias.copy_(torch.arange(4.0))

    def forward(self, x: Tensor) -> Any:
        self.beside = self.router(x).softmax(-1).square().mean()
        output = super().forward(x)
        return (output, self.beside) if self.returned else output


def test_a_loss_left_on_an_attribute_carries_the_loss_scale(world: World):
    norms = []
    for returned in (True, False):
        model = Beside(returned=returned)
        with world.zeroified(model, adamw(model), stage=3, precision=FP16):
            results = model(mlp_input(world.rank))
            output, beside = results if returned else (results, model.beside)
            assert beside is not None
            (1e-3 * output.square().mean() + 10 * beside).backward()
            norms.append(hpczero.clip_grad_norm_(model, 1e9))
    world.check(norms[0] == norms[1], norms)


class Written(MLP):
    """Puts its result in several places at once."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.kept: Any = 0.0
        self.state: Tensor | None = None
        self.raw = nn.Parameter(torch.full((3,), 0.2))

    def forward(self, batch: Any) -> Any:
        x = batch["x"] if isinstance(batch, dict) else batch
        if self.how == "state":
            x = x if self.state is None else x + self.state.mean()
            self.state = super().forward(x).sum(dim=1, keepdim=True)
            return self.state
        y = super().forward(x)
        if self.how == "dict":
            batch["logits"] = y
            return batch
        if self.how == "attribute":
            self.kept = {"logits": y}
            return self.kept
        if self.how == "parameter":
            return {"logits": y, "raw": self.raw}
        if self.how == "number":
            self.kept = y.square().mean() if self.training else 0.0
            return {"logits": y}
        return (
            {"logits": y + self(x)["logits"]}
            if self.how == "nested" and self._once()
            else {"logits": y}
        )

    def _once(self) -> bool:
        self.kept, first = 1.0 - self.kept, not self.kept
        return bool(first)


def _loss(model: Written, x: Tensor) -> Tensor:
    model.state = None
    if model.how == "number":
        model.eval()
        model(x)
        model.train()
    found = model({"x": x} if model.how == "dict" else x)
    if model.how == "state":
        return (found + model(x) + model(x)).square().mean()
    loss: Tensor = found["logits"].square().mean()
    if model.how == "parameter":
        loss = loss + found["raw"].square().sum()
    return loss + model.kept if model.how == "number" else loss


@pytest.mark.parametrize("how", ["dict", "attribute", "parameter", "number", "state", "nested"])
@pytest.mark.parametrize("stage", [0, 3])
def test_the_loss_scale_enters_once(world: World, stage, how):
    if how == "parameter" and stage == 3:
        return  # refused by name: a parameter is gone when forward is through
    plain = Written(how)
    sum(_loss(plain, mlp_input(rank)) / world.size for rank in range(world.size)).backward()  # type: ignore[union-attr]
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    model = Written(how)
    with world.zeroified(model, adamw(model), stage=stage, precision=FP16):
        _loss(model, mlp_input(world.rank)).backward()
        found = hpczero.full_gradients(model)
    largest = max(float(g.abs().max()) for g in expected.values())
    worst = max(float((found[n] - g).abs().max()) for n, g in expected.items() if n != "raw")
    if how == "parameter":
        worst = max(worst, float((found["raw"] - expected["raw"]).abs().max()))
    world.check(worst < 0.02 * largest, f"off by {worst / largest} of the largest")


class Unreadable(Mapping[str, Tensor]):
    """Refused in half precision: it holds a tensor, and cannot be written to."""

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def __getitem__(self, key: str) -> Tensor:
        return self.held

    def __iter__(self) -> Iterator[str]:
        return iter(["held"])

    def __len__(self) -> int:
        return 1


class Encodes(MLP):
    """Computes in a method, with something beside the input."""

    def encode(self, x: Tensor, beside: Any = None) -> Tensor:
        return super().forward(x)

    def forward(self, x: Tensor, beside: Any = None) -> Tensor:
        return self.encode(x)


@pytest.mark.parametrize("precision", ["bf16", FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ["encode", "__call__"])
def test_after_arguments_that_cannot_be_cast_calls_are_as_before(world: World, name, precision):
    model, x = Encodes(), mlp_input(world.rank)
    with world.zeroified(model, adamw(model), stage=2, precision=precision):
        hpczero.register_forward(model, "encode")
        expected = model(x)
        batch = {"x": x, "bad": Unreadable(torch.ones(2))}
        with pytest.raises(StepError, match="Unreadable is a mapping that cannot be written to"):
            getattr(model, name)(x, batch)
        world.check(batch["x"] is x, "the caller's batch holds cast copies")
        for found in (model(x), model.encode(x)):
            world.check(found.dtype is torch.float32 and torch.equal(found, expected))


@pytest.mark.parametrize("precision", ["fp32", "bf16", FP16], ids=["fp32", "bf16", "fp16"])
def test_a_container_that_raises_changes_no_call(world: World, precision):
    class Closed(Unreadable):
        def __getitem__(self, key: str) -> Tensor:
            raise OSError("file is closed")

    model, x = Encodes(), mlp_input(world.rank)
    with world.zeroified(model, adamw(model), stage=3, precision=precision):
        expected = model(x)
        model.store = Closed(x)  # type: ignore[assignment]
        world.check(torch.equal(model(x), expected))
        world.check(torch.equal(model(x, {"store": Closed(x)}), expected))


def test_in_fp16_a_penalty_and_a_part_alone_are_refused(world: World):
    with world.mlp(adamw, stage=0, precision=FP16) as (model, _):
        x = mlp_input(world.rank).requires_grad_()
        output = model(x)
        with pytest.raises(StepError, match="gradient of gradients"):
            torch.autograd.grad(output.sum(), x, create_graph=True)
        model.zero_grad()
        with pytest.raises(StepError, match="carry no loss scale; call the model itself"):
            model.layers[0](x.detach().half())
        with torch.no_grad():
            model.layers[0](x.detach().half())


@pytest.mark.parametrize("precision", ["bf16", FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_call_in_inference_mode_is_one_without_grad(world: World, stage, precision):
    with world.mlp(adamw, stage=stage, precision=precision) as (model, optimizer):
        with torch.no_grad():
            expected = model(mlp_input(world.rank))
        with torch.inference_mode():
            inside = mlp_input(world.rank)
            found = model(inside)
        world.check(torch.equal(found, expected) and found.dtype is torch.float32)
        model(mlp_input(world.rank)).square().sum().backward()
        optimizer.step()


class WithPositions(MLP):
    """Adds what it keeps in fp32, as sinusoidal positions are kept."""

    positions: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.linspace(0, 1, 7), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.positions)


@pytest.mark.parametrize("stage", [0, 3])
def test_where_two_dtypes_meet_torchs_error_says_why(world: World, stage):
    model = WithPositions()
    with world.zeroified(model, adamw(model), stage=stage, precision="bf16"):
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"(?s)BFloat16.*give it x.dtype.*autocast"):
                model(mlp_input(world.rank))
        model.positions = model.positions.bfloat16()
        model(mlp_input(world.rank)).sum().backward()
        world.check(hpczero.clip_grad_norm_(model, 1e9) > 0)
