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
from hpczero.sample import SampleOptions
from hpczero.weights import Weights


def sample(options: SampleOptions) -> None:
    """Continue the prompt on all ranks together; rank 0 writes the text. Collective over MPI's world.

    Every rank runs the same forwards and draws the same random numbers, so all choose the same tokens; only the weights
    are sharded.

    Raises:
        ConfigError: there are no such weights.
        CheckpointError: the weights are damaged; on every rank.
    """
    topology = start_topology(None)
    use_own_cores(topology)
    with topology.agreed("open the weights"):
        weights = Weights(Path(options.weights))
        tokenizer = weights.tokenizer
        # surrogateescape: the very bytes of the command line, were they UTF-8 or not
        ids = tokenizer.encode(options.prompt.encode(errors="surrogateescape"))
        prompt = torch.from_numpy(ids if len(ids) else np.array([tokenizer.separator]))
    with torch.device("meta"):
        model = GPT(weights.model)
    hpczero.zeroify(
        model, None, stage=options.stage, topology=topology, initialize=weights.read_into
    )
    model.eval()
    tokens = generate(
        model,
        prompt,
        num_tokens=options.tokens,
        context=weights.model.context,
        temperature=options.temperature,
        top_k=options.top_k or None,
        seed=options.seed,
    )
    if topology.is_root:
        text = tokenizer.decode(tokens.tolist()).decode(errors="replace")
        sys.stdout.buffer.write(f"{text}\n".encode())
        sys.stdout.flush()
    hpczero.release(model)
    topology.free()
