"""The first seconds of a command, before torch and MPI are imported.

The import is silent and takes seconds to a minute. Owns: what is said then, and how a job ends that rank 0 knows by
then cannot work. Must not know: what a command does, what can be wrong.
"""

from __future__ import annotations

import faulthandler
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Literal

from hpczero.errors import HpcZeroError, TopologyError, abort_job, launcher_rank, report
from hpczero.job import log
from hpczero.options.environment import Environment

_WAIT = "importing torch, starting MPI"


def tell_start(
    command: str,
    ranks: int | None,
    *,
    results: Path,
    level: Literal["info", "debug"] = "info",
) -> None:
    """Log one line of rank 0: what is being started, and what the wait is for. Not collective.

    Args:
        command: such as ``hpczero.train``.
        ranks: number of ranks that a launcher says it has started; None without one.
        results: folder that the command writes to.
        level: level of the log from here on.
    """
    log.configure(rank=launcher_rank(), node_index=0, level=level)
    log.info("%s, %d rank(s), results in %s; %s", _start_of(command), ranks or 1, results, _WAIT)


def tell_start_aside(command: str) -> None:
    """The line of ``tell_start`` on standard error, for a command whose standard output is its result.

    Not collective.
    """
    if launcher_rank() == 0:
        with suppress(OSError):  # the disk may be full that stderr is on
            sys.stderr.write(f"{_start_of(command)}; {_WAIT}\n")
            sys.stderr.flush()


def _start_of(command: str) -> str:
    return f"start: {command}, rank 0 on {socket.gethostname()}"


def end_before_mpi(error: HpcZeroError, environment: Environment) -> int | None:
    """Report a mistake that only rank 0 has found, at once, and end the job so that no other rank waits for this one.

    The job ends when the last rank has imported torch. The call returns if this process is the only one.

    Args:
        error: what is wrong.
        environment: of this process.

    Returns:
        The exit code. None if no launcher had said that this is rank 0, and MPI says that it is one of several: each of
        them may then think so, and they must find the mistake together.
    """
    told = environment.launched_rank is not None
    code = report(error) if told else error.exit_code
    # The others are on their way to MPI_Init and would wait for this rank there. That it exits with an error ends the
    # job only where its parent is a launcher that does so: not inside of `bash -c "... | tee log"`.
    meet_the_other_ranks_in_mpi_init(environment.timeout_s)
    from hpczero.job.topology import check_launch, started_ranks

    started = started_ranks()
    if not told:
        return report(error) if started == 1 else None
    try:
        check_launch(started, environment)
    except TopologyError as wrong:  # then the first error may rest on a wrong number of ranks
        report(wrong)
    if started > 1:
        abort_job(code)
    return code


def meet_the_other_ranks_in_mpi_init(timeout_s: float) -> None:
    """Start MPI. If a rank never does, the others end here with their stacks, and the job ends with them.

    Users read this function's name in that stack. MPI_Init keeps the interpreter's lock, so only faulthandler's own
    timer can still act, and it prints the stack alone.

    Args:
        timeout_s: HPCZERO_TIMEOUT in seconds; 0 waits for ever.
    """
    if timeout_s:
        faulthandler.dump_traceback_later(timeout_s, exit=True)
    import hpczero.job.topology  # noqa: F401  (its import starts MPI)

    faulthandler.cancel_dump_traceback_later()
