"""The sampling command: ``[mpirun -n 2] python -m hpczero.sample runs/default --prompt "def "``."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from hpczero.errors import ConfigError, run
from hpczero.options.config import LayoutOptions
from hpczero.options.reading import parse_command_line
from hpczero.run.starting.precheck import tell_start_aside


@dataclass(frozen=True)
class SampleOptions:
    """What to write, and from which weights.

    Attributes:
        weights: folder of a run, also of one that is not done or is running: its final weights or its newest sound
            checkpoint; a folder of checkpoints; one of them; or a model.safetensors.
        prompt: text to continue; empty: the start of a document.
        tokens: how many tokens to add.
        temperature: 0: always the most likely token; 1: as the model says.
        top_k: choose among the k most likely tokens; 0: among all.
        seed: of the choices.
        stage: ZeRO stage; at 3 every rank holds its shard of the weights only.
        token_file: token file that the run was trained on; needed where an earlier version saved the checkpoint.
        parallel: which ranks share what; it need not be what the run was trained with.
    """

    weights: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    prompt: str = ""
    tokens: int = 200
    temperature: float = 0.8
    top_k: int = 50
    seed: int = 0
    stage: Literal[0, 1, 2, 3] = 3
    token_file: Annotated[str, tyro.conf.arg(metavar="FILE")] = ""
    parallel: LayoutOptions = field(default_factory=LayoutOptions)

    def __post_init__(self) -> None:
        for name in ("tokens", "temperature", "top_k", "seed"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"--{name}: got {value!r}, expected a finite number, 0 or above")
        check_layout(self.parallel, self.stage)


def check_layout(options: LayoutOptions, stage: int) -> None:
    """Refuse what cannot work, or would do nothing, where text is written one token after the other.

    Raises:
        ConfigError: names the option and what to change.
    """
    if options.context > 1:
        raise ConfigError(
            f"--parallel.context: got {options.context}, but a text grows by one token, and most of its lengths do not "
            f"divide by {options.context}; expected 1 (--parallel.tensor and --parallel.pipeline divide a model "
            "that is too large for a rank)"
        )
    useless = {
        "secondary": "nothing is gathered for a backward",
        "schedule": "there is no backward to order",
        "interleave": "one text fills no pipeline",
    }
    for name, why in useless.items():
        got = getattr(options, name)
        if got != getattr(LayoutOptions, name):
            raise ConfigError(
                f"--parallel.{name}: got {str(got).lower()}, but in sampling {why}; leave it out"
            )
    options.check(stage=stage)


def main() -> int:
    """Write text as the command line says. Collective over the world."""
    options = parse_command_line(
        SampleOptions,
        sys.argv[1:],
        prog="python -m hpczero.sample",
        description="Generate text from the weights of a training run, on any number of ranks.",
    )
    tell_start_aside("hpczero.sample")
    # Here and not at the top: this import starts torch and MPI, which --help and bad options must not do.
    from hpczero.run.sampling import sample

    sample(
        options.weights,
        prompt=options.prompt,
        num_tokens=options.tokens,
        temperature=options.temperature,
        top_k=options.top_k or None,
        seed=options.seed,
        stage=options.stage,
        token_file=options.token_file,
        parallel=options.parallel,
    )
    return 0


if __name__ == "__main__":
    run(main)
