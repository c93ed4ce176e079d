"""One rank of a contender that can be asked to probe its host too (`scaling.contenders.ranks`).

Owns: that question. Must not know: how anything is measured.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from hpczero.errors import run
from hpczero.predict.machine import MeasuredKernels


def main() -> int:
    """As ``python -m scaling.contenders.rank``, and answers ``probe`` too."""
    from hpczero.probe.job import measure_kernels
    from scaling.contenders.rank import Rank
    from scaling.contenders.rank import main as answer

    class Prober(Rank):
        def probe(self) -> dict[str, Any]:
            return measure_kernels(self._contender.topology)  # type: ignore[attr-defined]  # of hpczero

    return answer(Prober)


def as_json(measured: MeasuredKernels) -> dict[str, Any]:
    """For records."""
    return asdict(measured)


if __name__ == "__main__":
    run(main)
