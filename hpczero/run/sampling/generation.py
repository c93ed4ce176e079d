"""Text from a sharded model.

Owns: the way from weights and a prompt to text on the screen. Must not know: how tokens are chosen (the model's
``generate``), which weights a path means (``sources.py``) or how they are sharded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import hpczero
from hpczero.adapters.gpt import GPTAdapter
from hpczero.job.launch import start_topology, use_own_cores
from hpczero.job.messages import hand_out
from hpczero.job.topology import Topology
from hpczero.models import generate
from hpczero.options.config import LayoutOptions
from hpczero.parallel.pipeline.runner import Pipeline
from hpczero.parallel.tensor import close
from hpczero.plan.degrees import check_model, mesh_on_nodes
from hpczero.run.sampling.sources import open_source
from hpczero.run.starting.building import divide


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
    parallel: LayoutOptions | None = None,
) -> None:
    """Continue the prompt on all ranks together; rank 0 writes the text. Collective over MPI's world.

    Every rank runs the same forwards and draws the same random numbers, so all choose the same tokens. Only the weights
    are sharded, or divided. Tensor ranks add up parts of products, so logits may differ in their last bits from those
    of one rank; the text differs where two tokens are that close.

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
        parallel: which ranks share what; None: all share one set of shards.

    Raises:
        ConfigError: there are no such weights, their tokenizer is unknown, or the ranks or the model do not suit the
            degrees.
        CheckpointError: the weights are damaged; on every rank.
    """
    parallel = parallel or LayoutOptions()
    topology = start_topology(None, partial(mesh_on_nodes, parallel))
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
    with topology.agreed("hold the model against the degrees"):
        check_model(parallel, weights.model)
    adapter = GPTAdapter(weights.model)
    with torch.device("meta"):
        model = adapter.build()
    divide(parallel, adapter, model, topology)
    hpczero.zeroify(model, None, stage=stage, topology=topology, initialize=weights.read_into)
    weights.close()
    model.eval()
    tokens = generate(
        _logits_of(model, topology, weights.model.vocab_size),
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
    close(model)
    topology.free()


def _logits_of(model: nn.Module, topology: Topology, vocab_size: int) -> Callable[[Tensor], Tensor]:
    """The model's logits on every rank, whichever rank has computed them; of a pipeline those of the last token."""
    stages = topology.pipeline
    if stages.size == 1:
        return model
    pipeline = Pipeline(model, micro_batches=1)

    def logits_of(tokens_BT: Tensor) -> Tensor:
        last = stages.size - 1
        found = pipeline.outputs([tokens_BT])
        logits_V = (
            torch.empty(vocab_size, dtype=torch.float32, device="cpu")
            if found is None
            else found[0][0, -1].float().cpu()
        )
        hand_out(stages, logits_V.numpy(), root=last)
        return logits_V[None, None]

    return logits_of
