"""The simulated job: recordings of the real engine against the plan, planted mistakes that are found, formulas."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from torch import nn

import hpczero
from hpczero.comm import Work as WorkOfComm
from hpczero.errors import HpcZeroError
from hpczero.models.config import GPTConfig, flops_per_token
from hpczero.options.config import LayoutOptions
from hpczero.plan.sent import sent_by
from hpczero.predict.machine import load_machine
from scaling.contenders.training import PLAIN as PLAIN_LAYOUT
from scaling.layouts.cases import spread_of
from scaling.simulate.engine import Recorded, Subject, record
from scaling.simulate.programs import (
    MAIN,
    Await,
    Call,
    OrderError,
    Program,
    Receive,
    Send,
    Signal,
    Work,
    check,
    expanded,
)
from scaling.simulate.recorder import Recorder
from scaling.simulate.replay import COMPUTE, Network, replay
from tests.helpers.cases import EVERYTHING

MODEL = GPTConfig(vocab_size=60, context=8, layers=4, hidden=48, heads=6)
DEEP = dataclasses.replace(MODEL, layers=6)  # more blocks than stages, and no multiple of four
MACHINE = load_machine("dgx-h100")
NETWORK = Network.of(MACHINE, message_s=3e-6)


class NoClock:
    """Work costs nothing."""

    def take(self) -> Work:
        return Work()

    def start(self) -> None: ...


def subject_of(
    ranks: int,
    local: int,
    options: LayoutOptions = PLAIN_LAYOUT,
    *,
    model: GPTConfig = MODEL,
    **others: Any,
) -> Subject:
    given = {"stage": 3, "precision": "bf16", "micro_batch": 1, **others}
    spread = spread_of(model, options, ranks, local, on_host=False, **given)
    return Subject(spread, options, MACHINE)


# With the subject, so that its id stays its own.
KEPT: dict[tuple[int, int], tuple[Subject, Recorded]] = {}


def recorded(subject: Subject, rank: int) -> Recorded:
    key = id(subject), rank
    if key not in KEPT:
        KEPT[key] = subject, record(subject, rank)
    return KEPT[key][1]


def programs_of(subject: Subject, *, every_rank: bool = False) -> list[Program]:
    def one(rank: int) -> tuple[Program, object]:
        found = recorded(subject, rank)
        return found.program, found.origins

    return expanded(one, subject.places, every_rank=every_rank)  # type: ignore[arg-type]


# A record of one rank takes two seconds of a processor: few ranks, few blocks.
PLAIN, THREE_NODES = subject_of(8, 2), subject_of(6, 2)
HYBRID = subject_of(4, 2, LayoutOptions(shard="node"))
PIPELINE = subject_of(8, 2, LayoutOptions(pipeline=4), stage=1, accumulation=4, model=DEEP)
BOTH = subject_of(12, 6, LayoutOptions(pipeline=2, tensor=3), stage=1, accumulation=2)
SUBJECTS = {
    "plain": PLAIN,
    "three nodes": THREE_NODES,
    "hybrid": HYBRID,
    "pipeline": PIPELINE,
    "pipeline and tensor": BOTH,
    "second shard": subject_of(4, 2, LayoutOptions(secondary=True)),
    "tokens": subject_of(4, 2, LayoutOptions(context=2), stage=2),
}


# --- sequences


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if "pipeline" in n else []) for n in SUBJECTS],
)
def test_sequences_of_all_ranks_fit_together(name: str) -> None:
    programs = programs_of(SUBJECTS[name], every_rank=True)
    check(programs)
    outcome = replay(programs, SUBJECTS[name].places, NETWORK)
    assert outcome.step_s > 0
    assert len(outcome.spent) == len(programs)


@pytest.mark.parametrize(
    "name",
    ["plain", "three nodes", "hybrid", pytest.param("pipeline and tensor", marks=pytest.mark.slow)],
)
def test_one_rank_of_each_kind_stands_for_all(name: str) -> None:
    some, every = (programs_of(SUBJECTS[name], every_rank=each) for each in (False, True))
    for one, other in zip(some, every, strict=True):
        assert one.rank == other.rank
        assert one.comms == other.comms
        assert [call.signature for call in one.calls] == [call.signature for call in other.calls]


@pytest.mark.parametrize("name", ["plain", "three nodes", "second shard"])
def test_bytes_and_messages_between_nodes_are_those_of_the_plan(name: str) -> None:
    subject = SUBJECTS[name]
    programs = programs_of(subject)
    outcome = replay(programs, subject.places, NETWORK)
    _, messages = recorded(subject, 0).planned
    if not subject.spread.secondary:
        assert outcome.messages == [messages] * len(programs)
        assert messages > 0
    planned = sent_by(subject.spread, 0).shards.between
    assert outcome.between_nbytes == [planned] * len(programs)


@pytest.mark.tool
@pytest.mark.parametrize("name", ["hybrid", "pipeline"])
def test_bytes_of_replicas_and_stages_are_those_of_the_plan(name: str) -> None:
    subject = SUBJECTS[name]
    programs = programs_of(subject)
    outcome = replay(programs, subject.places, NETWORK)
    for place in range(subject.spread.mesh.pipeline):
        rank = subject.spread.first_rank(place)
        # Stages with a tied weight compare five numbers of it, which the plan leaves out.
        sends = (entry for entry in programs[rank].entries() if isinstance(entry, Send))
        compared = sum(entry.nbytes for entry in sends if entry.dtype == "int64")
        planned = sent_by(subject.spread, place).total.between
        assert outcome.between_nbytes[rank] == planned + compared
        assert planned > 0


def test_counted_products_are_those_of_the_model() -> None:
    model = GPTConfig(vocab_size=512, context=128, layers=3, hidden=96, heads=6)
    found = record(subject_of(4, 2, model=model), 1)
    assert found.flops == pytest.approx(flops_per_token(model) * model.context, rel=0.02)


@pytest.mark.parametrize("name", ["pipeline", "pipeline and tensor", "tokens"])
def test_what_a_step_starts_after_its_update_the_next_forward_waits_for(name: str) -> None:
    lanes = recorded(SUBJECTS[name], 0).program.lanes
    main, beside = lanes[MAIN], lanes["shards"]
    ends = [entry.token for entry in beside if isinstance(entry, Signal)]
    assert sorted(ends) == sorted(entry.token for entry in main if isinstance(entry, Await))
    calls = [entry for entry in beside if isinstance(entry, Call)]
    gathers = len({call.name for call in calls if call.operation == "all_gather"})
    assert gathers > 1
    first, last = (main.index(Await(token, "shards")) for token in (ends[0], ends[gathers - 1]))
    started = [main.index(entry) for entry in main if isinstance(entry, Signal)]
    assert started[gathers - 1] < first
    assert any(isinstance(entry, Work) and entry.device_s for entry in main[first:last])


# --- mistakes that are planted


def test_a_wait_for_what_the_recorded_step_has_not_started_is_refused() -> None:
    recorder = Recorder(NoClock())
    recorder.begin()
    late = recorder.started("shards")
    recorder.begin()
    with pytest.raises(HpcZeroError, match=r"'shards'.* waits for operation 1 of the one before"):
        late.wait()


def with_one(subject: Subject, rank: int, other: Program) -> list[Program]:
    programs = programs_of(subject)
    programs[rank] = other
    return programs


def swap_two_blocks(model: nn.Module) -> None:
    blocks = model.blocks
    assert isinstance(blocks, nn.ModuleList)
    blocks[2], blocks[3] = blocks[3], blocks[2]


def test_two_units_in_another_order_on_one_rank_are_found_and_named() -> None:
    other = record(PLAIN, 5, prepare=swap_two_blocks).program
    with pytest.raises(
        OrderError,
        match=r"rank 5: call \d+ over .* is all_gather of 'blocks.3' .*expected .* of 'blocks.2' .*as on 3 of 4",
    ):
        check(with_one(PLAIN, 5, other))


def test_a_missing_reduction_is_found_and_named() -> None:
    def lose_one(model: nn.Module) -> None:
        comm = hpczero.sharding(model).collectives
        reduce = comm.reduce_scatter

        def reduce_all_but_one(*tensors: Any, name: str, **others: Any) -> WorkOfComm:
            if name == "blocks.1":
                return WorkOfComm(name)
            return reduce(*tensors, name=name, **others)

        comm.reduce_scatter = reduce_all_but_one  # type: ignore[method-assign]

    other = record(PLAIN, 3, prepare=lose_one).program
    with pytest.raises(
        OrderError,
        match=r"rank 3: call \d+ over .* expected reduce_scatter of 'blocks.1' .*as on 3 of 4",
    ):
        check(with_one(PLAIN, 3, other))


def test_another_dtype_is_found_and_named() -> None:
    spread = dataclasses.replace(PLAIN.spread, precision="fp32")
    other = record(dataclasses.replace(PLAIN, spread=spread), 6).program
    with pytest.raises(
        OrderError, match=r"rank 6: call \d+ .*bytes of float32\), expected .*bfloat16"
    ):
        check(with_one(PLAIN, 6, other))


def test_a_message_that_nobody_takes_is_found_and_named() -> None:
    mine = programs_of(PIPELINE)[2]
    lanes = {name: [*entries] for name, entries in mine.lanes.items()}
    lost = next(entry for entry in lanes[MAIN] if isinstance(entry, Receive))
    lanes[MAIN].remove(lost)
    with pytest.raises(
        OrderError, match=r"rank 0: message 1 over .* to rank 2 is activation .*expects none"
    ):
        check(with_one(PIPELINE, 2, dataclasses.replace(mine, lanes=lanes)))


class BlocksAlone:
    """Kernels of which the products of blocks' MLPs take time alone."""

    dispatch_s = 0.0

    def matmul_s(self, m: int, k: int, n: int) -> float:
        return 1.0 if MODEL.ffn_multiple * MODEL.hidden in (m, k, n) else 0.0

    def attention_s(self, tokens: int, sequence: int, width: int, *, backward: bool) -> float:
        return 0.0

    def element_s(self, kind: str, *, backward: bool) -> float:
        return 0.0

    def update_s(self, numel: int) -> float:
        return 0.0

    def sum_s(self, blocks: int, numel: int) -> float:
        return 0.0


@pytest.mark.tool
@pytest.mark.parametrize(
    ("stages", "micro_batches"), [(2, 3), (3, 4), (6, 6)] if EVERYTHING else [(2, 3), (3, 4)]
)
def test_bubble_of_equal_stages_without_network_is_the_formula(
    stages: int, micro_batches: int
) -> None:
    options = LayoutOptions(pipeline=stages)
    subject = subject_of(stages, 1, options, stage=1, accumulation=micro_batches, model=DEEP)
    slow = dataclasses.replace(MACHINE, memory_rate=float("inf"))
    subject = dataclasses.replace(subject, machine=slow, kernels=BlocksAlone())
    outcome = replay(programs_of(subject), subject.places, Network.none())
    for spent in outcome.spent:
        busy = spent[COMPUTE]
        assert (outcome.step_s - busy) / busy == pytest.approx((stages - 1) / micro_batches)


def test_one_rank_is_never_idle() -> None:
    subject = subject_of(1, 1)
    (program,) = programs_of(subject)
    assert not list(program.calls)
    outcome = replay([program], subject.places, NETWORK)
    assert outcome.idle_s == pytest.approx([0.0])
    assert outcome.step_s > 0


# --- this processor


@pytest.mark.parametrize(
    "options", [LayoutOptions(), LayoutOptions(tensor=2)], ids=["plain", "tensor"]
)
def test_a_small_model_in_memory_makes_the_same_calls_and_takes_time(
    options: LayoutOptions,
) -> None:
    subject = subject_of(8, 2, options, precision="fp32")
    here = dataclasses.replace(subject, machine=None)
    measured = record(here, 3).program
    assert sum(entry.seconds for entry in measured.entries() if isinstance(entry, Work)) > 1e-3
    gathers = [call.name for call in measured.calls if call.operation == "all_gather" and call.sent]
    counted = recorded(subject, 3).program
    expected = [
        call.name for call in counted.calls if call.operation == "all_gather" and call.messages
    ]
    assert gathers == expected
