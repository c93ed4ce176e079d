"""The training command: ``[mpirun -n 4] python -m hpczero.train [run.toml] [--section.key value ...]``.

Owns: what can be refused before MPI and torch start. Must not know: the loop itself, which is ``loop.py``.
"""

from __future__ import annotations

import dataclasses
import difflib
import sys

from hpczero.config import ModelOptions
from hpczero.errors import ConfigError, run
from hpczero.models import PRESETS, GPTConfig
from hpczero.options import read_run_config
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
        from hpczero.loop import train

        return train(config, model, accelerator, signals)


def model_config(options: ModelOptions) -> GPTConfig:
    """The preset with its overrides; the vocabulary is the preset's until the tokenizer is known.

    Raises:
        ConfigError: unknown preset, or sizes that do not fit together.
    """
    preset = PRESETS.get(options.preset)
    if preset is None:
        close = difflib.get_close_matches(options.preset, PRESETS, n=3) or list(PRESETS)
        raise ConfigError(f"model.preset: got {options.preset!r}, did you mean {', '.join(close)}?")
    try:
        return dataclasses.replace(preset, **options.overrides())
    except ValueError as error:
        raise ConfigError(f"model: {error}") from error


if __name__ == "__main__":
    run(main)
