"""The training command: ``[mpirun -n 4] python -m hpczero.train [run.toml] [--section.key value ...]``.

Here is the order of events until torch and MPI have started; the loop itself is ``run/loop.py``.
"""

from __future__ import annotations

import sys

from hpczero.errors import launcher_rank, run
from hpczero.job.signals import Signals
from hpczero.models import GPTConfig
from hpczero.options.config import RunConfig
from hpczero.options.environment import Environment
from hpczero.options.reading import read_run_config
from hpczero.plan.degrees import check_model
from hpczero.run.starting.precheck import (
    end_before_mpi,
    meet_the_other_ranks_in_mpi_init,
    model_config,
    tell_start,
)


def main() -> int:
    """Train as the command line says. Collective over MPI's world."""
    config, model = options()
    environment = Environment.read()
    # Now: the imports below take seconds, in which SIGUSR1 would end the process.
    with Signals() as signals:
        tell_start(config, environment.launched_ranks)
        # Here and not at the top: the line above must not wait for NumPy, which this takes, nor the other ranks.
        if launcher_rank() == 0:
            from hpczero.run.starting.precheck import mistake_of

            mistake = mistake_of(config, model, environment)
            code = None if mistake is None else end_before_mpi(mistake, environment)
            if code is not None:
                return code
        # These start torch and MPI, which --help and bad options must not do.
        from hpczero.accelerator import be_deterministic, choose_accelerator
        from hpczero.accelerator.choice import leave_out_compiler
        from hpczero.adapters.gpt import GPTAdapter

        if not config.model.compile:
            leave_out_compiler()
        if config.parallel.deterministic:
            be_deterministic()
        accelerator = choose_accelerator(config.parallel.device)  # before MPI binds to a device
        meet_the_other_ranks_in_mpi_init(environment.timeout_s)
        from hpczero.run.loop import train

        adapter = None if model is None else GPTAdapter(model)
        return train(config, adapter, accelerator, signals)


def options() -> tuple[RunConfig, GPTConfig | None]:
    """What the command line asks for, and the GPT to train; None for a factory's model. Imports neither torch nor MPI.

    Raises:
        ConfigError: options are unknown, malformed, or do not fit together.
    """
    config = read_run_config(sys.argv[1:])
    model = None if config.model.factory else model_config(config.model)
    config.parallel.check(stage=config.parallel.stage, auto=config.parallel.auto)
    if model is not None:
        check_model(config.parallel, model)
    return config, model


if __name__ == "__main__":
    run(main)
