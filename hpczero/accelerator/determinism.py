"""The same bits in every run: torch and cuBLAS told to use nothing that has no fixed order.

Owns: what must be set for that, and when. Must not know: MPI, models. Collectives and sums of hpczero have a fixed
order anyway.
"""

from __future__ import annotations

import torch

from hpczero.errors import ConfigError
from hpczero.options.environment import fix_cublas_workspace


def be_deterministic() -> None:
    """Allow only deterministic operations in this process. Not collective; comes before the first call of CUDA.

    Fused attention then takes its ordered backward, and an operation that has no ordered form raises torch's
    RuntimeError, which names it.

    Raises:
        ConfigError: CUDA has started already, or CUBLAS_WORKSPACE_CONFIG is set to what has no fixed order.

    Source: torch's notes on reproducibility; issue 20, item 3.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise ConfigError(
            "deterministic: CUDA has started in this process, and cuBLAS has read its settings; expected to be asked "
            "before anything is on a device. Call it first, or export CUBLAS_WORKSPACE_CONFIG=:4096:8"
        )
    fix_cublas_workspace()
    torch.use_deterministic_algorithms(True)
    # It would fill all new memory with NaN, which costs a pass over each. Nothing here reads memory before writing it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False  # by a measurement, which has another outcome every time
