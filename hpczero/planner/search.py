"""The search: all settings that a planner may choose, held against memory, ordered by their time.

Owns: the order of questions, and that all ranks ask the same ones. Must not know: how bytes or seconds are counted, how
ranks agree, torch, MPI.

    all or nothing on a tier -> which fit -> the least part of those that need a tier -> which fit -> the choice
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hpczero.plan.peak import Run
from hpczero.planner.candidates import Freedom, candidates
from hpczero.planner.choice import Choice, choose
from hpczero.planner.fractions import least_units, parts, worth_a_part
from hpczero.predict.model import Prediction

Agree = Callable[[Sequence[int]], Sequence[int]]


def search(
    run: Run,
    freedom: Freedom,
    foretell: Callable[[Run], Prediction],
    *,
    fits: Callable[[Run], bool],
    balance: float | None = None,
    agree: Agree = tuple,
) -> Choice:
    """The choice. It is as collective as ``agree``.

    Args:
        run: as it was asked for.
        freedom: what may differ from it.
        foretell: the step of a run; the same on every rank.
        fits: whether a run fits what this rank sees.
        balance: fraction with which host and device end their updates together; None: not known.
        agree: of each number, the largest that any rank has; what does not fit one rank fits none.
    """
    fitting: dict[int, bool] = {}

    def hold(runs: Sequence[Run]) -> None:
        short = agree([int(not fits(one)) for one in runs])
        fitting.update({id(one): not bad for one, bad in zip(runs, short, strict=True)})

    runs = list(candidates(run, freedom))
    hold(runs)
    if freedom.fractions:
        wanted = worth_a_part(runs, lambda one: fitting[id(one)])
        least = agree([least_units(one, fits) for one in wanted])
        more = parts(wanted, least, runs, balance)
        hold(more)
        runs += more
    return choose(runs, lambda one: fitting[id(one)], foretell)
