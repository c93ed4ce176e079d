"""The replay command: ``[mpirun -n 2] python -m hpczero.replay runs/mine --step 500``."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from hpczero.errors import ConfigError, run
from hpczero.options.config import RunConfig
from hpczero.options.reading import load_toml, parse_command_line
from hpczero.run.starting.precheck import model_config, tell_start_aside


@dataclass(frozen=True)
class ReplayOptions:
    """Which steps of which run to take again.

    Attributes:
        folder: of a run with run.exact, also of one that is running. Nothing is written there.
        step: last step to take; the first one follows the newest checkpoint before it.
        stage: ZeRO stage; None: that of the run. It need not be the same, nor need the number of ranks.
        device: cpu or cuda; None: that of the run.
    """

    folder: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    step: int
    stage: Literal[0, 1, 2, 3] | None = None
    device: Literal["cpu", "cuda"] | None = None

    def settled(self, config: RunConfig) -> RunConfig:
        """The options of the run as a replay takes them.

        Raises:
            ConfigError: the run is not exact.
        """
        if config.run.exact == "off":
            raise ConfigError(
                f"{self.folder}: was trained with run.exact off, so another start need not give the same bits; "
                "expected a run with --run.exact require"
            )
        parallel = config.parallel
        return dataclasses.replace(
            config,
            parallel=dataclasses.replace(
                parallel,
                nodes=None,
                stage=parallel.stage if self.stage is None else self.stage,
                device=self.device or parallel.device,
            ),
            log=dataclasses.replace(config.log, digest_every=1),
            check=dataclasses.replace(config.check, leaves=None),
        )


def main() -> int:
    """Replay as the command line says. Collective over MPI's world."""
    options = parse_command_line(
        ReplayOptions,
        sys.argv[1:],
        prog="python -m hpczero.replay",
        description="Take steps of an exact run again, on any number of ranks, and name what is the first to differ.",
    )
    path = Path(options.folder) / "config.toml"
    if not path.is_file():
        raise ConfigError(f"{options.folder}: has no config.toml, expected the folder of a run")
    config = options.settled(load_toml(path, RunConfig))
    model = None if config.model.factory else model_config(config.model)
    tell_start_aside("hpczero.replay")
    # Here and not at the top: these start torch and MPI, which --help and bad options must not do.
    from hpczero.accelerator import be_deterministic, choose_accelerator
    from hpczero.adapters.gpt import GPTAdapter
    from hpczero.job.signals import Signals

    if config.parallel.deterministic:
        be_deterministic()
    accelerator = choose_accelerator(config.parallel.device)
    from hpczero.run.replay import replay
    from hpczero.run.results.folder import RunFolder

    with Signals() as signals:
        return replay(
            RunFolder(Path(options.folder)),
            config,
            None if model is None else GPTAdapter(model),
            accelerator,
            step=options.step,
            signals=signals,
        )


if __name__ == "__main__":
    run(main)
