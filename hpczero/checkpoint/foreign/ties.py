"""Names of weights that are one parameter: what the files state, checked against the values that they hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hpczero.adapters import gpt2
from hpczero.checkpoint.foreign.weight_files import Held, WeightFiles
from hpczero.errors import CheckpointMismatch


def of_gpt2(weights: WeightFiles) -> dict[str, str]:
    """The head of a GPT-2, with the token embedding it is tied to.

    A head of its own is not tied, unless config.json says so.

    Raises:
        CheckpointMismatch: config.json ties a head that differs from the token embedding.
    """
    both = gpt2.HEAD in weights and gpt2.TABLE in weights
    tied = weights.model.get("tie_embeddings")
    if tied and both and not is_equal(weights, gpt2.HEAD, gpt2.TABLE):
        raise CheckpointMismatch(
            f"{weights.path}: config.json ties the head to the table of tokens (tie_word_embeddings, by default true), "
            f"and {gpt2.HEAD} differs from {gpt2.TABLE} in the file: some versions of transformers compute with that "
            "head, others with the table. Set tie_word_embeddings to false in config.json to keep both, or take "
            f"{gpt2.HEAD} out of the file to tie them"
        )
    if tied is None:
        tied = gpt2.HEAD not in weights or (both and is_equal(weights, gpt2.HEAD, gpt2.TABLE))
    return {gpt2.HEAD: gpt2.TABLE} if tied else {}


def of_storage(weights: WeightFiles) -> dict[str, str]:
    """Names of tensors that share memory, each with the first of them."""
    first: dict[Any, str] = {}
    found = {}
    for name, held in weights.items():
        if held.storage is not None and first.setdefault(held.storage, name) != name:
            found[name] = first[held.storage]
    return found


def check(weights: WeightFiles, aliases: Mapping[str, str]) -> None:
    """Refuse to tie names with two values, because one value would be lost.

    Args:
        weights: where the values are; a further name need not be in them.
        aliases: further names of parameters, each with the name that is kept.

    Raises:
        CheckpointMismatch: the message names the two.
    """
    for alias, name in aliases.items():
        if alias in weights and name in weights and not is_equal(weights, alias, name):
            shapes = [weights[one].shape for one in (alias, name)]
            what = "values" if shapes[0] == shapes[1] else f"shapes, {shapes[0]} and {shapes[1]}"
            raise CheckpointMismatch(
                f"{weights.path}: cannot tie {alias} to {name}: they have different {what} in the file, expected the "
                "same; leave out that they are tied, or take one of them out of the file"
            )


def is_equal(weights: Mapping[str, Held], name: str, other: str) -> bool:
    """Whether two tensors have one shape and the same values in fp32. Reads them, unless they are the same memory."""
    one, two = weights[name], weights[other]
    if one.shape != two.shape or is_same_memory(weights, name, other):
        return one.shape == two.shape
    pairs = zip(one.pieces(0, one.numel), two.pieces(0, two.numel), strict=True)
    return all(are_equal(first, second) for first, second in pairs)


def is_same_memory(weights: Mapping[str, Held], name: str, other: str) -> bool:
    """Whether two tensors are known to be the same memory."""
    return weights[name].storage is not None and weights[name].storage == weights[other].storage


def are_equal(one: Tensor, other: Tensor) -> bool:
    """Whether values are equal; NaN equals NaN."""
    return torch.equal(one, other) or bool(
        ((one == other) | (one.isnan() & other.isnan())).all().item()
    )
