"""Hooks that ``torch.compile`` runs as they are, and that modes around a model do not see.

Owns: how the compiler and torch's dispatcher are told. Must not know: what a hook does.

A compiler that traced a hook would keep what the hook found during the trace. Units would be whole in the trace alone,
and ranks would not wait for each other.

``torch.compiler.disable`` says the same, but loads the compiler, which takes seconds and 100 MB in every process. Its
two marks are therefore set here. If this torch has other marks, ``disable`` is called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Hook = TypeVar("Hook", bound=Callable[..., Any])

REASON = "a hook of hpczero's"


def unseen(hook: Hook) -> Hook:
    """A function that does the same, past the modes of ``torch.utils._python_dispatch`` that are in force.

    Selective recomputation (``torch.utils.checkpoint.create_selective_checkpoint_contexts``) is such a mode. It counts
    the operations of a block and expects the same again in backward. Those of a hook are none of the block's: where a
    unit is whole already, there are fewer.
    """

    @functools.wraps(hook)
    def past(*args: Any, **kwargs: Any) -> Any:
        with torch._C._DisableTorchDispatch():
            return hook(*args, **kwargs)

    return untraced(past)  # type: ignore[return-value]


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
