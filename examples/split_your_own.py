"""A plain torch model of your own over tensor ranks and stages: ``mpirun -n 4 python examples/split_your_own.py``.

The model knows nothing of ranks. A rule says which layers are cut and how; ``Stages`` says how the forward falls into
parts. Both name modules as ``model.named_modules()`` does. Any number of ranks works that 2 x 2 divides.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hpczero
from hpczero.parallel import Kept, Rule, Split, Stages, close, cut, split

WORDS, WIDTH, CONTEXT = 29, 32, 16


class Mixer(nn.Module):
    """A block that mixes each position with the mean of those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2 * WIDTH)
        self.up = nn.Linear(2 * WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, WIDTH) in and out."""
        count = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        before = x.cumsum(1) / count
        mixed: Tensor = x + self.down(F.gelu(self.up(self.norm(torch.cat((x, before), -1)))))
        return mixed


class Model(nn.Module):
    """Guesses the next of ``WORDS`` words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Mixer() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean loss."""
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return loss_of(self, x, targets)


def loss_of(model: Model, x: Tensor, targets: Tensor) -> Tensor:
    """From what the last block returns to the mean loss."""
    logits = model.head(model.norm(x))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# begin: the 30 lines
RULE = Rule(
    {
        "words": Split(0),  # by words; 29 do not divide by 2, and are padded
        "blocks.*.norm": Kept.STREAM,  # every rank keeps it whole
        "blocks.*.up": Split(0),  # by outputs ...
        "blocks.*.down": Split(1),  # ... and by inputs: one sum behind both
        "norm": Kept.STREAM,
        "head": Split(
            0, joined=True
        ),  # every rank gets all logits, for a loss that knows nothing of parts
    }
)
STAGES = Stages(
    blocks="blocks",
    before=("words",),
    after=("norm", "head"),
    enter=lambda model, tokens: model.words(tokens),
    call=lambda model, block, x: block(x),
    leave=loss_of,
)


def build(topology: hpczero.Topology) -> tuple[nn.Module, torch.optim.Optimizer]:
    """This rank's part of the model, in shards."""
    model: nn.Module = Model()
    cut(model, topology, STAGES)  # this stage's blocks
    split(model, topology, RULE)  # this tensor rank's part of their layers
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    hpczero.zeroify(model, optimizer, stage=1, topology=topology)
    return model, optimizer


# end: the 30 lines


def batch(step: int, rank: int) -> Tensor:
    """(8, CONTEXT + 1) tokens of a data parallel rank: each word follows from the one before it."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, WORDS, (8, CONTEXT + 1), generator=generator)
    for time in range(1, CONTEXT + 1):
        tokens[:, time] = (3 * tokens[:, time - 1] + 1) % WORDS
    return tokens


def main() -> None:
    """Train for a while, and say what the loss was and is."""
    torch.set_num_threads(1)  # ranks share the cores of their node
    torch.manual_seed(0)
    topology = hpczero.Topology.of_world()
    size = topology.size
    topology.free()
    tensor, pipeline = (2 if size % 2 == 0 else 1), (2 if size % 4 == 0 else 1)
    mesh = hpczero.Mesh(pipeline=pipeline, shard=size // (tensor * pipeline), tensor=tensor)
    topology = hpczero.Topology.of_world(mesh=mesh)
    model, optimizer = build(topology)
    run = hpczero.Pipeline(model, micro_batches=2)
    losses = []
    for step in range(150):
        parts = batch(step, topology.data.rank).chunk(2)
        losses.append(run.step([part[:, :-1] for part in parts], [part[:, 1:] for part in parts]))
        hpczero.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if topology.is_root:
        print(f"{mesh}")
        print(f"loss fell from {losses[0]:.3f} to {losses[-1]:.3f}")
    hpczero.release(model)
    close(model)
    topology.free()


if __name__ == "__main__":
    main()
