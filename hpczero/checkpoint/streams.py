"""The random streams of a process as bytes: those of torch and its device, NumPy and Python."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt
import torch

WORDS = 624  # of a Mersenne twister

Bytes = npt.NDArray[np.uint8]


def capture() -> dict[str, Bytes]:
    """State of each stream; each has the same length in every call."""
    version, words, gauss = random.getstate()
    assert version == 3, "of every Python that is supported"
    kind, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002  (users' code may draw from it)
    assert kind == "MT19937", "the global stream"
    device = {}
    if _device_has_stream():
        device["cuda"] = torch.cuda.get_rng_state().numpy().copy()
    return {
        **device,
        "torch": torch.get_rng_state().numpy().copy(),
        "numpy": _pack(np.append(keys, position), bool(has_gauss), float(cached)),
        "python": _pack(np.array(words), gauss is not None, gauss or 0.0),
    }


def restore(states: dict[str, Bytes]) -> None:
    """Continue the streams from where ``capture`` was called."""
    torch.set_rng_state(torch.from_numpy(states["torch"].copy()))
    if _device_has_stream():
        if "cuda" in states:
            torch.cuda.set_rng_state(torch.from_numpy(states["cuda"].copy()))
        else:  # saved where there was no device: one stream follows from the other
            torch.cuda.manual_seed(int(torch.initial_seed()))
    words, has_gauss, gauss = _unpack(states["numpy"])
    np.random.set_state(  # noqa: NPY002
        ("MT19937", words[:WORDS].astype(np.uint32), int(words[WORDS]), int(has_gauss), gauss)
    )
    words, has_gauss, gauss = _unpack(states["python"])
    random.setstate((3, tuple(map(int, words)), gauss if has_gauss else None))


def start_anew(key: int) -> None:
    """Start streams for a rank that no stored one belongs to; the same for the same ``key``."""
    torch.manual_seed(key)
    np.random.seed(key % 2**32)  # noqa: NPY002
    random.seed(key)


def _device_has_stream() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _pack(words: npt.NDArray[np.integer], has_gauss: bool, gauss: float) -> Bytes:
    tail = np.array([float(has_gauss), gauss], dtype="<f8")
    return np.concatenate([words.astype("<u4").view(np.uint8), tail.view(np.uint8)])


def _unpack(state: Bytes) -> tuple[npt.NDArray[np.uint32], bool, float]:
    tail = state[-16:].copy().view("<f8")
    return state[:-16].copy().view("<u4"), bool(tail[0]), float(tail[1])
