"""Hooks that ``torch.compile`` runs as they are, where it compiles a whole model.

Owns: how the compiler is told. Must not know: what a hook does. A compiler that traced a hook would keep what the hook
found during the trace. Units would be whole in the trace alone, and ranks would not wait for each other.

``torch.compiler.disable`` says the same, but loads the compiler, which takes seconds and 100 MB in every process. Its
two marks are therefore set here. If this torch has other marks, ``disable`` is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Hook = TypeVar("Hook", bound=Callable[..., Any])

REASON = "a hook of hpczero's"


def untraced(hook: Hook) -> Hook:
    """The same function. The compiler neither traces nor compiles it, nor what it calls."""
    try:
        from torch._C._dynamo.eval_frame import (
            _FrameAction,
            _FrameExecStrategy,
            set_code_exec_strategy,
        )
    except ImportError:
        return torch.compiler.disable(hook, reason=REASON)  # type: ignore[no-any-return, no-untyped-call]
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(hook.__code__, skip)
    hook._torchdynamo_disable = True  # type: ignore[attr-defined]
    hook._torchdynamo_disable_msg = REASON  # type: ignore[attr-defined]
    return hook
