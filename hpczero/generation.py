"""Text from a sharded model.

Owns: the way from a weights file and a prompt to text on the screen. Must not know: how tokens are chosen (the model's
``generate``) or how weights are sharded.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

import hpczero
from hpczero.launch import start_topology, use_own_cores
from hpczero.models import GPT, generate
from hpczero.weights import Weights


def sample(
    path: str,
    *,
    prompt: str,
    num_tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int,
    stage: int,
) -> None:
    """Continue the prompt on all ranks together; rank 0 writes the text. Collective over MPI's world.

    Every rank runs the same forwards and draws the same random numbers, so all choose the same tokens; only the weights
    are sharded.

    Args:
        path: weights file or run folder.
        prompt: text to continue; empty: the start of a document.
        num_tokens: how many to add.
        temperature: 0 takes the most likely token.
        top_k: choose among the k most likely tokens; None: among all.
        seed: of the choices.
        stage: ZeRO stage, 0 to 3.

    Raises:
        ConfigError: there are no such weights.
        CheckpointError: the weights are damaged; on every rank.
    """
    topology = start_topology(None)
    use_own_cores(topology)
    with topology.agreed("open the weights"):
        weights = Weights(Path(path))
        tokenizer = weights.tokenizer
        # surrogateescape: the very bytes of the command line, were they UTF-8 or not
        ids = tokenizer.encode(prompt.encode(errors="surrogateescape"))
        prompt_T = torch.from_numpy(ids if len(ids) else np.array([tokenizer.separator]))
    with torch.device("meta"):
        model = GPT(weights.model)
    hpczero.zeroify(model, None, stage=stage, topology=topology, initialize=weights.read_into)
    model.eval()
    tokens = generate(
        model,
        prompt_T,
        num_tokens=num_tokens,
        context=weights.model.context,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
    )
    if topology.is_root:
        text = tokenizer.decode(tokens.tolist()).decode(errors="replace")
        sys.stdout.buffer.write(f"{text}\n".encode())
        sys.stdout.flush()
    hpczero.release(model)
    topology.free()
