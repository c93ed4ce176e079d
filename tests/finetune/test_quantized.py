"""A frozen base that rests and travels as codes: training, codes, bytes, checkpoints, changes, refusals."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

import hpczero
from hpczero.errors import ConfigError, PlanError
from hpczero.memory.buffers import Buffer
from hpczero.plan import Plan
from hpczero.plan.layout import Codec
from hpczero.plan.rules import default_rule
from hpczero.zero.units.encoded import EncodedParameters
from tests.checkpoint.programs import first_ranks
from tests.finetune.models import adapted_gpt, off, optimizer_of, plain_steps, rounded, steps
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import (
    adamw,
    raises_on_all,
    same_state,
    tiny_gpt,
    tiny_tokens,
    zeroified,
)

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Sharding, Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3, 4)]

CODECS = pytest.mark.parametrize("name", ["int8", "nf4"])
TRANSPORTS = pytest.mark.parametrize("transport", ["flat", "auto"])
NAME = "blocks.0.mlp.expansion.weight"


def codes(sharding: Sharding, comm: MPI.Intracomm) -> dict[str, bytes]:
    """Codes of all shards end to end, without those of padding."""
    found = {}
    for unit in sharding.units:
        if isinstance(unit.whole, EncodedParameters):
            layout, codec = unit.spec.layout, unit.whole.codec
            data = unit.whole.encoded.view(torch.uint8)[: layout.shard_numel * codec.bits // 8]
            everybody = b"".join(comm.allgather(bytes(data.tolist())))
            found[unit.spec.name] = everybody[: layout.numel * codec.bits // 8]
    return found


@CODECS
@TRANSPORTS
def test_half_precision_sees_the_codes_rounded_once(
    comm: MPI.Intracomm, topology: Topology, name: str, transport: str
) -> None:
    plain = rounded(adapted_gpt(), name).bfloat16()
    model = adapted_gpt()
    options: dict[str, Any] = {"transport": transport, "topology": topology, "quantize": name}
    with zeroified(model, optimizer_of(model), precision="bf16", **options), torch.no_grad():
        found = model(tiny_tokens(7))
        parallel_assert(comm, torch.equal(found, plain(tiny_tokens(7)).to(found.dtype)))


@CODECS
@TRANSPORTS
def test_bytes_held_and_sent_are_the_plans(
    comm: MPI.Intracomm, topology: Topology, name: str, transport: str
) -> None:
    model = adapted_gpt(hidden=64, heads=4, layers=3)
    optimizer = optimizer_of(model)
    options: dict[str, Any] = {"transport": transport, "topology": topology, "precision": "bf16"}
    with zeroified(model, optimizer, quantize=name, **options) as sharding:
        plan, footprint = sharding.plan, sharding.collectives.footprint
        steps(model, optimizer, comm.rank, range(2))  # the first also makes buffers
        sharding.memory.reset_peak()
        sharding.collectives.stats.reset()
        steps(model, optimizer, comm.rank, range(2, 3))
        memory, traffic = plan.memory(footprint=footprint), plan.traffic(footprint=footprint)
        held = sharding.memory.peak
        for category in ("parameters", "unsharded"):
            pair = held.get(category, 0), getattr(memory, category)
            parallel_assert(comm, pair[0] == pair[1], f"{category}: held and planned {pair}")
        pair = sharding.collectives.stats.sent_nbytes["all_gather"], traffic.all_gather_nbytes
        parallel_assert(comm, pair[0] == pair[1], f"sent and planned {pair}")
    coded = [unit for unit in plan.units if unit.codec is not None]
    each = {"int8": 1.0625, "nf4": 0.5625}[name]
    rest = sum(unit.rest_nbytes or 0 for unit in coded)
    parallel_assert(comm, rest == each * sum(unit.layout.shard_numel for unit in coded))


def test_codes_are_the_same_for_any_number_of_ranks(comm: MPI.Intracomm) -> None:
    found: list[dict[str, bytes]] = []
    for size in range(1, comm.size + 1):
        with first_ranks(comm, size) as topology:
            if topology is not None:
                model = adapted_gpt()
                with zeroified(model, None, topology=topology, quantize="nf4") as sharding:
                    found.append(codes(sharding, topology.world.comm))
    parallel_assert(comm, len(found[0]) == 2 and all(each == found[0] for each in found))


@CODECS
@TRANSPORTS
@pytest.mark.parametrize("parameters", ["all", "trained"])
def test_checkpoints_bring_the_same_codes_and_go_on(
    comm: MPI.Intracomm,
    topology: Topology,
    folder: Path,
    name: str,
    transport: str,
    parameters: str,
) -> None:
    plain = rounded(adapted_gpt(), name)
    plain_steps(plain, optimizer_of(plain), comm.size, range(3))
    model = adapted_gpt()
    optimizer = optimizer_of(model)
    options: dict[str, Any] = {"transport": transport, "quantize": name}
    with zeroified(model, optimizer, topology=topology, **options) as sharding:
        steps(model, optimizer, comm.rank, range(2))
        before = codes(sharding, comm)
        hpczero.checkpoint.save(folder, model, step=2, parameters=parameters)
        steps(model, optimizer, comm.rank, range(2, 3))
        straight = hpczero.full_state_dict(model)
        hpczero.checkpoint.load(folder, model)
        parallel_assert(comm, codes(sharding, comm) == before)
        steps(model, optimizer, comm.rank, range(2, 3))
        again = hpczero.full_state_dict(model)
        parallel_assert(comm, same_state(again, straight), "other bits after the load")
        apart = off(again, plain)
        parallel_assert(comm, apart <= 2e-7, f"off by {apart}")
    alike = True
    with first_ranks(comm, 1) as alone:
        if alone is not None:
            model = adapted_gpt()
            with zeroified(model, optimizer_of(model), topology=alone, **options) as sharding:
                hpczero.checkpoint.load(folder, model)
                alike = codes(sharding, alone.world.comm) == before
    parallel_assert(comm, alike, "other codes at one rank")


@CODECS
@TRANSPORTS
def test_changes_inside_gathered_become_codes_and_others_stay(
    comm: MPI.Intracomm, topology: Topology, name: str, transport: str
) -> None:
    model = adapted_gpt()
    options: dict[str, Any] = {"transport": transport, "topology": topology, "quantize": name}
    with zeroified(model, optimizer_of(model), precision="bf16", **options) as sharding:
        before = codes(sharding, comm)
        with hpczero.gathered(model, modifier_rank=comm.size - 1):
            pass
        parallel_assert(comm, codes(sharding, comm) == before, "nothing was changed")
        with hpczero.gathered(model, modifier_rank=0):
            if comm.rank == 0:
                with torch.no_grad():
                    model.get_parameter(NAME)[0, 0] = 9.0  # the largest of its block
        with hpczero.gathered(model):
            found = model.get_parameter(NAME).detach().clone()
        whole = hpczero.full_state_dict(model)
        after = codes(sharding, comm)
    parallel_assert(comm, found[0, 0].item() == 9.0)
    parallel_assert(comm, whole is None or torch.equal(whole[NAME].bfloat16(), found))
    other = "blocks.1 (frozen) ("
    kept = [key for key in before if key.startswith(other)]
    parallel_assert(comm, len(kept) == 1 and all(after[key] == before[key] for key in kept))
    parallel_assert(comm, after != before)


@TRANSPORTS
def test_a_block_that_runs_goes_on_with_what_its_changes_became(
    comm: MPI.Intracomm, topology: Topology, transport: str
) -> None:
    model = adapted_gpt()

    def change(*_: object) -> None:
        hook.remove()
        with hpczero.gathered(model, modifier_rank=0):
            if comm.rank == 0:
                model.get_parameter(NAME)[:, 0] += 0.01

    with zeroified(model, None, transport=transport, topology=topology, quantize="nf4"):
        with torch.no_grad():
            before = model(tiny_tokens(5))
            hook = model.get_submodule("blocks.0").register_forward_pre_hook(change)
            during, after = model(tiny_tokens(5)), model(tiny_tokens(5))
        parallel_assert(comm, torch.equal(during, after), "values that nobody keeps were used")
        parallel_assert(comm, not torch.equal(before, after), "nothing was changed")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("transport", ["hierarchical", "window"])
def test_unsharding_ahead_changes_no_bit(
    comm: MPI.Intracomm, topology: Topology, transport: str
) -> None:
    found: list[Tensor] = []
    for overlap in (True, False):
        nodes = hpczero.Topology.create(comm, nodes=[0, 1])
        model = adapted_gpt()
        optimizer = optimizer_of(model)
        options: dict[str, Any] = {"transport": transport, "overlap": overlap, "quantize": "int8"}
        with zeroified(model, optimizer, topology=nodes, **options) as sharding:
            parallel_assert(comm, sharding.collectives.footprint.overlap == overlap)
            steps(model, optimizer, comm.rank, range(3))
            found.append(torch.cat([unit.gather_values() for unit in sharding.units]))
        nodes.free()
    parallel_assert(comm, torch.equal(*found))


def test_a_released_model_has_the_decoded_values(comm: MPI.Intracomm, topology: Topology) -> None:
    model = adapted_gpt()
    hpczero.zeroify(model, None, topology=topology, quantize="nf4")
    with torch.no_grad():
        during = model(tiny_tokens(3))
    hpczero.release(model, whole=True)
    plain = adapted_gpt()
    # Without an optimizer all is frozen, the small matrices too.
    plain = rounded(plain.requires_grad_(False), "nf4")
    parallel_assert(comm, torch.equal(model(tiny_tokens(3)), during))
    parallel_assert(comm, torch.equal(plain(tiny_tokens(3)), during))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", [MemoryError, KeyboardInterrupt])
def test_memory_that_runs_out_as_codes_are_gathered_leaves_the_unit_as_it_was(
    comm: MPI.Intracomm,
    topology: Topology,
    kind: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = adapted_gpt()
    take = Buffer.take
    with zeroified(model, None, transport="flat", topology=topology, quantize="nf4"):
        expected = hpczero.full_state_dict(model) or {}
        takes = 0
        for failing in range(100):
            count = iter(range(100))

            def once(buffer: Buffer, count: Any = count, failing: int = failing) -> None:
                if next(count) == failing:
                    raise kind
                take(buffer)

            monkeypatch.setattr(Buffer, "take", once)
            failed = False
            try:
                with hpczero.gathered(model):
                    pass
            except kind:
                failed = True
            if not failed:
                break
            takes += 1
            with hpczero.gathered(model):
                same = [torch.equal(p, expected[n]) for n, p in model.named_parameters()]
            parallel_assert(comm, all(same), f"other values after take {failing} has failed")
            with torch.no_grad():
                model(tiny_tokens(3))  # gives back what was whole when memory ran out
        parallel_assert(comm, takes == 7, f"{takes} takes of 3 buffers and 2 wires, 2 decoded")


def test_what_cannot_be_is_refused(comm: MPI.Intracomm, topology: Topology) -> None:
    model = adapted_gpt()
    call = partial(hpczero.zeroify, model, optimizer_of(model), topology=topology)
    raises_on_all(comm, ConfigError, "quantize: got 'int2'", call, quantize="int2")
    raises_on_all(comm, PlanError, "stage 2 keeps parameters whole", call, quantize="int8", stage=2)
    raises_on_all(comm, PlanError, "secondary=True", call, quantize="int8", secondary=True)
    trained = tiny_gpt()
    call = partial(hpczero.zeroify, trained, adamw(trained), topology=topology)
    nothing = "no frozen matrix outside of its root unit"
    raises_on_all(comm, PlanError, nothing, call, quantize="int8")
    plan = Plan.build(model, num_shards=2, stage=3, rule=default_rule, codec=Codec("int8"))
    coded = [unit for unit in plan.units if unit.codec is not None]
    assert [unit.name for unit in coded] == [f"blocks.{i} (frozen) (int8)" for i in (0, 1)]
    assert all(len(slot.shape) == 2 for unit in coded for slot in unit.layout.slots)
