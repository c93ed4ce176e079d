"""A training step with tiny tensors, by plain torch or in a zeroified model, part by part.

Tensors are so small that kernels take no time: what is left is what the host does for each of them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import hpczero
from hpczero.models.config import GPTConfig
from hpczero.models.gpt import GPT

PARTS = ("forward", "backward", "clip", "step", "rest")
# Numbers that the host asks of a tensor: of one on a device it would wait. ``tolist`` is no operation of torch's.
WAITS = ("aten._local_scalar_dense", "aten.nonzero")
SEED, CLIP = 0, 1.0


class Waits(TorchDispatchMode):
    """Counts what would wait for a device.

    Attributes:
        found: how often, by operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __enter__(self) -> Waits:
        self._tolist = Tensor.tolist

        def counted(tensor: Tensor) -> Any:  # Any: a number, or lists of them
            self.found["tolist"] += 1
            return self._tolist(tensor)

        Tensor.tolist = counted  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        Tensor.tolist = self._tolist  # type: ignore[method-assign]
        super().__exit__(*exception)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # Any: as torch calls it
        """Count ``func``, and run it."""
        name = str(func.overloadpacket)
        if name in WAITS:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


class Stepper:
    """One model in training, in this process alone.

    Attributes:
        name: in tables.
    """

    def __init__(self, config: GPTConfig, stage: int | None) -> None:
        """Collective over MPI's world, which is one rank.

        Args:
            config: sizes.
            stage: of ZeRO; None: plain torch.
        """
        self.name = "plain torch" if stage is None else f"stage {stage}"
        self._sharded = stage is not None
        self.model = GPT(config)
        self.model.initialize_all(seed=SEED)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self._clip: Callable[[], Tensor | float]
        self._number: Callable[[Tensor], Callable[[], float]]
        if stage is None:
            self._clip = lambda: torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            self._number = lambda loss: loss.item
        else:
            hpczero.zeroify(self.model, self._optimizer, stage=stage)
            self._clip = lambda: hpczero.clip_grad_norm_(self.model, CLIP)
            self._number = partial(hpczero.read_later, self.model)
        generator = torch.Generator().manual_seed(SEED)
        tokens = torch.randint(config.vocab_size, (1, config.context + 1), generator=generator)
        self._tokens, self._targets = tokens[:, :-1], tokens[:, 1:]

    def take(self) -> tuple[dict[str, float], float]:
        """One step: thread time of each part in seconds, and the loss."""
        at = [time.thread_time()]

        def reached() -> None:
            at.append(time.thread_time())

        logits = self.model(self._tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), self._targets.flatten())
        reached()
        loss.backward()
        reached()
        value = self._number(loss)
        self._clip()
        reached()
        self._optimizer.step()
        reached()
        self._optimizer.zero_grad()
        number = value()
        reached()
        return {
            part: after - before for part, before, after in zip(PARTS, at[:-1], at[1:], strict=True)
        }, number

    def waits(self) -> dict[str, int]:
        """Waits for a device in one step, that for the loss among them, by operation."""
        with Waits() as counted:
            self.take()
        return dict(counted.found)

    def close(self) -> None:
        """Give everything back."""
        if self._sharded:
            hpczero.release(self.model)
