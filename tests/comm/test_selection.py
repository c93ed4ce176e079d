"""The table of algorithms: sizes, text, JSON, and what users may ask for."""

from __future__ import annotations

import json

import pytest

from hpczero.comm.algorithms import EXCHANGES, GATHERS
from hpczero.comm.rails import DEFAULT, AlgorithmChoice, Selection, boundary, size_text
from hpczero.errors import ConfigError
from hpczero.options.values import ALGORITHMS

MEASURED = Selection(
    (
        AlgorithmChoice("doubling", at_nbytes=2**14, seconds={"ring": 2e-4, "doubling": 1e-4}),
        AlgorithmChoice("ring", from_nbytes=2**17, at_nbytes=2**20, seconds={"ring": 0.05}),
    ),
    (
        AlgorithmChoice("pairwise", chunk_nbytes=2**18),
        AlgorithmChoice("library", from_nbytes=2**20),
    ),
    origin="measured in 1.2 s",
)


def test_size_decides() -> None:
    names = [MEASURED.gather_for(n).algorithm for n in (0, 1, 2**17 - 1, 2**17, 2**30)]
    assert names == ["doubling", "doubling", "doubling", "ring", "ring"]
    assert MEASURED.exchange_for(2**20 - 1).chunk_nbytes == 2**18


def test_it_survives_json() -> None:
    read = Selection.from_json(json.loads(json.dumps(MEASURED.as_json())), origin="a file")
    assert (read.gathers, read.exchanges) == (MEASURED.gathers, MEASURED.exchanges)
    assert read.origin == "a file"


RING, PAIRS = {"algorithm": "ring"}, [{"algorithm": "pairwise"}]


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        {"gathers": [], "exchanges": []},
        {"gathers": [{"algorithm": "telepathy"}], "exchanges": PAIRS},
        {"gathers": [{**RING, "more": 1}], "exchanges": PAIRS},
        {"gathers": [RING], "exchanges": [{"algorithm": "pairwise", "chunk_nbytes": 0}]},
        {"gathers": [{**RING, "from_nbytes": 5}], "exchanges": PAIRS},
    ],
)
def test_what_is_no_selection_is_refused(value: object) -> None:
    with pytest.raises(ValueError):
        Selection.from_json(value, origin="a file")  # type: ignore[arg-type]


def test_description_has_one_line_and_the_table_the_times() -> None:
    assert MEASURED.describe() == (
        "all-gather doubling, from 128 KiB ring; reduce-scatter pairwise/256 KiB, from 1 MiB library "
        "(measured in 1.2 s)"
    )
    assert MEASURED.table() == [
        "all-gather of 16 KiB blocks: doubling (doubling 0.1 ms, ring 0.2 ms)",
        "all-gather of 1 MiB blocks: ring (ring 50 ms)",
    ]
    assert DEFAULT.table() == []


def test_names_may_be_given() -> None:
    given = Selection.parse("all_gather=doubling, reduce_scatter=library")
    found = given.gather_for(0).algorithm, given.exchange_for(0).algorithm
    assert found == ("doubling", "library")
    assert Selection.parse("all_gather=library").exchanges == DEFAULT.exchanges


def test_names_are_those_of_the_classes() -> None:
    assert {
        "all_gather": tuple(kind.name for kind in GATHERS),
        "reduce_scatter": tuple(kind.name for kind in EXCHANGES),
    } == ALGORITHMS


@pytest.mark.parametrize("text", ["ring", "all_gather=", "reduce_scatter=ring", "gather=ring"])
def test_unknown_names_are_refused(text: str) -> None:
    said = r"algorithms: got .*, expected auto, .*all_gather=library\|"
    with pytest.raises(ConfigError, match=said):
        Selection.parse(text)


def test_sizes_meet_in_the_geometric_middle() -> None:
    assert boundary(2**10, 2**12) == 2**11
    assert [size_text(n) for n in (2**14, 2**20, 3 * 2**19)] == ["16 KiB", "1 MiB", "1.5 MiB"]


def test_rounds_can_be_made_larger_but_not_smaller() -> None:
    wide = MEASURED.in_rounds_of(2**19)
    assert [choice.chunk_nbytes for choice in wide.exchanges] == [2**19, 2**19]
    assert [choice.algorithm for choice in wide.exchanges] == ["pairwise", "library"]
    assert MEASURED.in_rounds_of(1) == MEASURED
