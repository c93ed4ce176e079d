"""Options of memory tiers of other types than they are declared: refused by name, before anything is done."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hpczero.errors import PlanError
from hpczero.plan import Stage
from hpczero.plan.offload import Activations, Offload

COUNTS = ["32MB", 32e6, True, np.int64(2**15), None]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", ["window", "buffers", "ahead"])
def test_counts_of_an_offload_are_ints(name: str, count: Any) -> None:
    with pytest.raises(PlanError, match=rf"offload\.{name}: got .*expected a whole number"):
        Offload("host", **{name: count}).check(Stage.of(3))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", ["window", "buffers"])
def test_counts_of_activations_are_ints(name: str, count: Any) -> None:
    with pytest.raises(PlanError, match=rf"activations\.{name}: got .*expected a whole number"):
        Activations("block", "disk", "here", **{name: count}).check(on_host=True)


@pytest.mark.parametrize("fraction", ["0.5", None, True])
def test_a_fraction_is_a_number(fraction: Any) -> None:
    with pytest.raises(PlanError, match=r"offload\.fraction: got .*expected a number from 0"):
        Offload("host", fraction=fraction).check(Stage.of(3))


def test_no_is_not_taken_for_yes() -> None:
    delayed: Any = "no"
    with pytest.raises(PlanError, match=r"offload\.delayed: got 'no'"):
        Offload("host", "host", step="host", delayed=delayed).check(Stage.of(2))


@pytest.mark.parametrize("folder", ["", b"/scratch", 5])
def test_a_folder_is_a_path(folder: Any) -> None:
    with pytest.raises(PlanError, match=r"offload\.folder: got .*expected a path"):
        Offload("disk", folder=folder).check(Stage.of(3))
    with pytest.raises(PlanError, match=r"activations\.folder: got .*expected a path"):
        Activations("block", "disk", folder).check(on_host=True)
