"""AdamW8bit: torch's AdamW whose moments are kept in 8 bits between steps.

Owns: which map each moment has. Must not know: shards, how codes are kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import AdamW

from hpczero.optim.blocks import Signed, Unsigned


class AdamW8bit(AdamW):
    """The update is torch's AdamW, in fp32. On a zeroified model each moment is then kept in blocks of 64 codes.

    17/8 bytes for each element instead of 8. Blocks are counted in units, not in parameters, so any number of ranks and
    every stage keep the same codes. On a plain model it is AdamW, with moments in fp32.

    Source: Dettmers et al., 8-bit optimizers via block-wise quantization, ICLR 2022.
    """

    # Read by zeroify: how each state is kept between steps.
    hpczero_coded_states: ClassVar[dict[str, Any]] = {"exp_avg": Signed, "exp_avg_sq": Unsigned}

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
    ) -> None:
        """As of torch.optim.AdamW; not collective.

        ``foreach`` and ``fused`` are torch's choice, which gives the same bits wherever a tensor is cut.

        Args:
            params: parameters, or groups.
            lr: learning rate.
            betas: of the moments.
            eps: added to the root of the second moment.
            weight_decay: decoupled.
            maximize: go up instead of down.
        """
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize)
