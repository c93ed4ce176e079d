"""Text from a sharded model.

Owns: the way from weights and a prompt to text on the screen. Must not know: how tokens are chosen (the model's
``generate``), which weights a path means (``sources.py``) or how they are sharded.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

import hpczero
from hpczero.job.launch import start_topology, use_own_cores
from hpczero.models import GPT, generate
from hpczero.run.sampling.sources import open_source


def sample(
    path: str,
    *,
    prompt: str,
    num_tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int,
    stage: int,
    token_file: str = "",
) -> None:
    """Continue the prompt on all ranks together; rank 0 writes the text. Collective over MPI's world.

    Every rank runs the same forwards and draws the same random numbers, so all choose the same tokens. Only the weights
    are sharded.

    Args:
        path: run folder, folder of checkpoints, checkpoint or weights file.
        prompt: text to continue; an empty one is the start of a document.
        num_tokens: how many to add.
        temperature: 0 takes the most likely token.
        top_k: choose among the k most likely tokens; None chooses among all.
        seed: seed of the choices.
        stage: ZeRO stage, 0 to 3.
        token_file: the token file that the run was trained on, for checkpoints of earlier versions; empty if the
            weights state their tokenizer.

    Raises:
        ConfigError: there are no such weights, or their tokenizer is unknown.
        CheckpointError: the weights are damaged; on every rank.
    """
    topology = start_topology(None)
    use_own_cores(topology)
    weights = open_source(Path(path), topology, token_file=Path(token_file) if token_file else None)
    tokenizer = weights.tokenizer
    if topology.is_root:  # not on stdout, which is the text's
        sys.stderr.write(f"weights of step {weights.step:,}: {weights.path}\n")
        sys.stderr.flush()
    with topology.agreed("read the prompt"):
        # surrogateescape: the very bytes of the command line, were they UTF-8 or not
        ids = tokenizer.encode(prompt.encode(errors="surrogateescape"))
        prompt_T = torch.from_numpy(ids if len(ids) else np.array([tokenizer.separator]))
    with torch.device("meta"):
        model = GPT(weights.model)
    hpczero.zeroify(model, None, stage=stage, topology=topology, initialize=weights.read_into)
    weights.close()
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
