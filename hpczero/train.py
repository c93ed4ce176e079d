"""The training command: ``[mpirun -n 4] python -m hpczero.train [run.toml] [--section.key value ...]``.

Owns: what can be refused before MPI and torch start. Must not know: the loop itself, which is ``loop.py``.
"""

from __future__ import annotations

import dataclasses
import difflib
import faulthandler
import sys

from hpczero.config import ModelOptions
from hpczero.environment import Environment
from hpczero.errors import ConfigError, run
from hpczero.models import PRESETS, GPTConfig
from hpczero.options import read_run_config
from hpczero.regularfile import shown
from hpczero.signals import Signals


def main() -> int:
    """Train as the command line says. Collective over the world."""
    config = read_run_config(sys.argv[1:])
    model = model_config(config.model)
    with (
        Signals() as signals
    ):  # now: the imports below take seconds, in which SIGUSR1 would end the process
        # Here and not at the top: these imports start torch and MPI, which --help and bad options must not do.
        from hpczero.accelerator import choose_accelerator

        accelerator = choose_accelerator(config.parallel.device)  # before MPI binds to a device
        meet_the_other_ranks_in_mpi_init(Environment.read().timeout_s)
        from hpczero.loop import train

        return train(config, model, accelerator, signals)


def meet_the_other_ranks_in_mpi_init(timeout_s: float) -> None:
    """Start MPI. Where a rank never does, the others end here with their stacks, and so the job, instead of waiting.

    The name is what a user reads in that stack: MPI_Init keeps the interpreter's lock, so only faulthandler's own timer
    can still act, and it says nothing but the stack.

    Args:
        timeout_s: HPCZERO_TIMEOUT; 0 waits for ever.
    """
    if timeout_s:
        faulthandler.dump_traceback_later(timeout_s, exit=True)
    import hpczero.topology  # noqa: F401  (its import starts MPI)

    faulthandler.cancel_dump_traceback_later()


def model_config(options: ModelOptions) -> GPTConfig:
    """The preset with its overrides; the vocabulary is the preset's until the tokenizer is known.

    Raises:
        ConfigError: unknown preset, or sizes that do not fit together.
    """
    preset = PRESETS.get(options.preset)
    if preset is None:
        close = difflib.get_close_matches(options.preset, PRESETS, n=3) or list(PRESETS)
        raise ConfigError(
            f"model.preset: got {shown(options.preset)}, did you mean {', '.join(close)}?"
        )
    try:
        return dataclasses.replace(preset, **options.overrides())
    except ValueError as error:
        raise ConfigError(f"model: {error}") from error


if __name__ == "__main__":
    run(main)
