"""The error tree, exit codes, and the one way a command ends.

It uses MPI only where the module is loaded already: an error must not start MPI.
"""

from __future__ import annotations

import atexit
import errno
import os
import select
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

EXIT_FAILURE = 1
EXIT_CORRUPT_CHECKPOINT = 65
EXIT_REQUEUE = 75
EXIT_MISCONFIGURED = 78
EXIT_HANG = 86
EXIT_READER_LEFT = 141

FIRST_S = 2.0  # how long other ranks leave rank 0 to tell an error of all before MPI is up
TOLD_S = 10.0  # how long a rank waits for the others to agree who tells an error

EXHAUSTED = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
)


class HpcZeroError(Exception):
    """Base of all errors raised on purpose; the message says rank, what, got, expected and what to do."""

    exit_code = EXIT_FAILURE
    agreed = False  # True once every rank raises it together: then each exits by itself and no job is aborted
    raised_by = 0  # ranks of a topology that raise it together; 0 where that is not known

    def on_all_ranks(self) -> HpcZeroError:
        """The error itself, marked as one that every rank raises together."""
        self.agreed = True
        return self


class ConfigError(HpcZeroError, ValueError):
    """An option, or a combination of options, that cannot work."""

    exit_code = EXIT_MISCONFIGURED


class TopologyError(HpcZeroError, ValueError):
    """Ranks, nodes or communicators are not what the request needs."""

    exit_code = EXIT_MISCONFIGURED


class PlanError(HpcZeroError, ValueError):
    """A model or optimizer that cannot be sharded as asked."""

    exit_code = EXIT_MISCONFIGURED


class DataError(HpcZeroError, ValueError):
    """Missing, empty or malformed training data."""

    exit_code = EXIT_MISCONFIGURED


class CommError(HpcZeroError, RuntimeError):
    """Ranks disagree about the next collective, or a buffer cannot be sent."""


class StepError(HpcZeroError, RuntimeError):
    """A step that must not go on: non-finite or unreduced gradients, parameters touched while sharded."""


class OutOfMemory(HpcZeroError, MemoryError):
    """Memory ran out; the message has what the plan needs beside what the allocator said."""


class TierError(HpcZeroError, RuntimeError):
    """Bytes that a tier could not keep or bring back, or that it was asked for wrongly; names medium and place."""


class CheckpointError(HpcZeroError, RuntimeError):
    """A checkpoint that cannot be written or read."""

    exit_code = EXIT_CORRUPT_CHECKPOINT


class CheckpointNotWritten(CheckpointError):
    """A save that failed; older checkpoints are as they were."""

    exit_code = EXIT_FAILURE


class CorruptCheckpoint(CheckpointError):
    """A checkpoint whose bytes are not those that were written."""


class CheckpointMismatch(CheckpointError, ValueError):
    """A sound checkpoint that does not belong to this model, optimizer or version."""

    exit_code = EXIT_MISCONFIGURED


class StoppedEarly(HpcZeroError):
    """A run that was asked to stop before its first step; the same command begins it again."""

    exit_code = EXIT_REQUEUE


class CheckpointBusy(CheckpointError):
    """Another job writes to the same folder."""

    exit_code = EXIT_MISCONFIGURED


def launcher_rank() -> int:
    """Rank by the launcher's environment, before MPI is up; 0 without a launcher."""
    for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"):
        value = os.environ.get(name, "")
        if value.isascii() and value.isdigit() and len(value) < 10:
            return int(value)
    return 0


def launched_by_open_mpi() -> bool:
    """Whether Open MPI's own launcher, ``mpirun``, has started this process."""
    return "OMPI_COMM_WORLD_SIZE" in os.environ


def _running_mpi(ranks: int = 2) -> Any:
    """mpi4py's module where it is up with so many ranks at least; else None."""
    mpi = sys.modules.get("mpi4py.MPI")
    up = mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized()
    return mpi if mpi is not None and up and mpi.COMM_WORLD.size >= ranks else None


def _mpi_began() -> bool:
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and mpi.Is_initialized()


def abort_job(code: int) -> None:
    """End every rank of the job if MPI is up in this process; otherwise return."""
    mpi = _running_mpi()
    if mpi is not None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # a log on a full disk must not keep the other ranks waiting
                stream.flush()
        mpi.COMM_WORLD.Abort(code)


def report(error: BaseException) -> int:
    """Write ``error`` to stderr with the rank in front and return its exit code.

    Our own errors, and the machine's, print as one line; anything else with its traceback.
    """
    _say(_text_of(error))
    return _code_of(error)


def report_once(error: BaseException) -> int:
    """Report an error that all ranks raise together. Of ranks with the same text one writes it, and how many they are.

    Collective over MPI's world, where MPI is up. A rank that has waited for the others too long writes its own error
    and ends the job.
    """
    text, mpi = _text_of(error), _running_mpi()
    if mpi is None:
        _say(text)
        return _code_of(error)
    world = mpi.COMM_WORLD
    mine = bytearray(zlib.crc32(text.encode("utf-8", "replace")).to_bytes(4, "little"))
    found = bytearray(4 * world.size)
    met = _waits(world.Iallgather(mine, found))
    same = [rank for rank in range(world.size) if found[4 * rank : 4 * rank + 4] == mine]
    if not met:
        _say(text)
    elif same[0] == world.rank:
        told = f"(told once; {len(same)} of {world.size} ranks ended with it)"
        _say(f"{text.rstrip()} {told}" if same[1:] else text)
    # A launcher may end the job as soon as one rank has exited, before another has spoken.
    if not (met and _waits(world.Ibarrier())):
        abort_job(_code_of(error))
    return _code_of(error)


def _waits(request: Any) -> bool:
    """Whether ``request`` of MPI is done within TOLD_S seconds."""
    deadline = time.monotonic() + TOLD_S
    while not request.Test():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def _code_of(error: BaseException) -> int:
    return error.exit_code if isinstance(error, HpcZeroError) else EXIT_FAILURE


def _text_of(error: BaseException) -> str:
    if isinstance(error, HpcZeroError):
        return f"{type(error).__name__}: {error}"
    return _of_the_machine(error) or "".join(traceback.format_exception(error))


def _say(text: str) -> None:
    rank = launcher_rank()
    with suppress(OSError):  # the disk may be full that stderr is on
        sys.stderr.write("".join(f"[rank {rank}] {line}\n" for line in text.rstrip().splitlines()))
        sys.stderr.flush()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on the host or on a device; torch has no class for the host's."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in words_of(error)
    )


def words_of(error: BaseException) -> str:
    """``str(error)``; where a class of a program's own fails in that, what Python prints instead."""
    try:
        return str(error)
    except Exception:  # whatever it is, the job has to end for the error before
        return "<exception str() failed>"


def _of_the_machine(error: BaseException) -> str | None:
    """One line for an error of a machine that has no more to give, where a traceback tells nothing; else None."""
    own = Path(__file__)
    frames = traceback.extract_tb(error.__traceback__)
    places = [(Path(f.filename), f.lineno) for f in frames]
    ours = [
        f"{path.name}:{line}" for path, line in places if own.parent in path.parents and path != own
    ]
    where = f" (at {ours[-1]})" if ours else ""
    if isinstance(error, OSError) and error.errno in EXHAUSTED:
        what = error.filename or "a file, or the output"
        return (
            f"OSError: {what}: {os.strerror(error.errno)}{where}. Make room or raise the limit, and start again; what "
            "was saved before stays"
        )
    if is_out_of_memory(error):
        first = next(iter(words_of(error).splitlines()), "")
        return (
            f"{type(error).__name__}: {first}{where}. Out of memory: take a smaller model or micro-batch, or more "
            "ranks on more nodes; `python -m hpczero.plan` says what fits"
        )
    return None


def explain_exhaustion(text: str) -> None:
    """Begin the report of an uncaught failed allocation with ``text``, in programs that are not our commands.

    A later call replaces an earlier one.
    """
    previous = sys.excepthook
    if hasattr(previous, "explains"):
        previous.explains = text
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if is_out_of_memory(error):
            _say(f"out of memory: {hook.explains}")  # type: ignore[attr-defined]
        previous(kind, error, trace)  # which may end the job

    hook.explains = text  # type: ignore[attr-defined]
    hook.ends_the_job = getattr(previous, "ends_the_job", False)  # type: ignore[attr-defined]
    sys.excepthook = hook


def install_abort_hook() -> None:
    """Make an uncaught error on one rank end the whole job, in programs that are not our commands.

    Plain ``mpirun python loop.py`` otherwise leaves the peers of a failed rank waiting for ever.
    """
    previous = sys.excepthook
    if getattr(previous, "ends_the_job", False):
        return
    told: list[BaseException] = []

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        told.append(error)
        agreed, code = getattr(error, "agreed", False), EXIT_FAILURE
        try:
            if issubclass(kind, HpcZeroError):
                code = (report_once if agreed else report)(error)
            else:
                previous(kind, error, trace)
        except Exception as failed:  # a hook of the program's own; the job has to end all the same
            for each in (error, failed):
                sys.__excepthook__(type(each), each, each.__traceback__)
        if not agreed:
            abort_job(code)

    def end() -> None:
        """Where a library's hook stands in place of this one, it alone was told (rich's says so to nobody else)."""
        error = getattr(sys, "last_value", None)
        replaced = not getattr(sys.excepthook, "ends_the_job", False)
        if (
            replaced
            and error is not None
            and all(error is not each for each in told)
            and not getattr(error, "agreed", False)
        ):
            abort_job(EXIT_FAILURE)

    atexit.register(end)
    hook.ends_the_job = True  # type: ignore[attr-defined]  # marks our own hook
    sys.excepthook = hook


def run(main: Callable[[], int | None]) -> None:
    """Run a command and exit with its code; an error on one rank ends the job on all of them.

    The rule of ``python -m mpi4py``: an uncaught error must not leave peers waiting in a collective for ever.
    """
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: paths may be any bytes
    try:
        code = main() or 0
        sys.stdout.flush()
    except SystemExit:
        raise
    except KeyboardInterrupt:
        abort_job(130)
        code = 130
    except BaseException as error:  # the last frame of a command: reported, never swallowed
        # As a C program that is piped into head: nobody is there to tell.
        left = isinstance(error, BrokenPipeError) and _reader_left()
        # A mistake in the options is every rank's. The launcher ends the job when rank 0 has told it.
        if isinstance(error, ConfigError) and launcher_rank() and not _mpi_began():
            time.sleep(FIRST_S)
        agreed = getattr(error, "agreed", False)
        code = EXIT_READER_LEFT if left else (report_once if agreed else report)(error)
        if isinstance(error, OSError) and error.errno in EXHAUSTED:
            _drop_output()
        if not agreed:
            abort_job(code)
    _leave(code)


def _leave(code: int) -> NoReturn:
    """Exit as Python does; where a daemon thread is left in the end, without tearing the interpreter down under it.

    Such a thread that comes back from compiled code meanwhile is unwound there, which Rust answers with a segmentation
    fault.
    """

    def end() -> None:
        atexit.unregister(end)
        atexit._run_exitfuncs()  # those that were registered earlier, which would have come after this one
        if not any(thread.daemon for thread in threading.enumerate()):
            return
        mpi = _running_mpi(ranks=1)
        if mpi is not None:
            mpi.Finalize()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code)

    atexit.register(end)
    sys.exit(code)


def _reader_left() -> bool:
    """Whether nobody reads our stdout any more. What is still in its buffer is then dropped."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    left = bool(poll.poll(0))
    if left:
        _drop_output()
    return left


def _drop_output() -> None:
    """Drop what is still in the buffer of stdout: Python would fail with it once more at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
