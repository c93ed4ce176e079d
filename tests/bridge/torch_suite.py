"""The tests that torch ships for its backends, over the bridge: ``python -m tests.bridge.torch_suite`` counts them.

They are those of ``torch.testing._internal.distributed.distributed_test``, as gloo runs them, and need ``expecttest``
from PyPI. They run in an MPI job of three ranks, as in the CI of torch; after one that hangs the rest goes on in a new
job.
``--backend gloo`` runs the same over gloo, which says how much of this applies to this machine. It takes some minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import unittest
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RANKS = 3
LIMIT_S = 40.0  # of one test
AFTER_S = 5.0  # how long ranks wait for one that has failed
MODULE = "tests.bridge.torch_suite"

# What does not apply, by a part of the name: gloo by its name, or what only a backend in C++ has.
NOT_APPLICABLE = {
    "monitored_barrier": "gloo's alone, by name",
    "test_get_backend": "asks for the name gloo",
    "test_backend_full_group": "asks for the name gloo",
    "test_backend_group": "asks for the name gloo",
    "sparse": "sparse tensors are refused by name",
    "test_barrier_timeout": "gloo's timeout while its store is joined",
    "test_new_subgroups_world_size_not_divisible": "needs an even number of ranks",
    # These fail over gloo on the same machine too.
    "cuda": "needs CUDA, and does not look for it",
    "test_batch_isend_irecv_op_err": "needs CUDA, and does not look for it",
    "test_batch_isend_irecv_mixed_backend_err": "needs NCCL, and does not look for it",
    "test_SyncBatchNorm_process_group": "needs torchvision, and does not look for it",
    "test_new_subgroups_with_group_param": "needs 4 ranks, and does not look for them",
}


def main() -> int:
    """Run all tests, job after job; print counts and what failed."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--backend", choices=("bridge", "gloo"), default="bridge")
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("-k", dest="part", default="", help="of the names of tests")
    parser.add_argument("--job", help="internal: the file of names that one rank runs")
    options = parser.parse_args()
    if options.job:
        return run_job(Path(options.job), options.backend)
    with tempfile.TemporaryDirectory(prefix="hpczero-torch-suite-") as place:
        found = run_all(Path(place), options)
    show(found, options)
    return 0


def run_all(place: Path, options: argparse.Namespace) -> dict[str, tuple[str, str]]:
    """Verdict and words of each test, by its name."""
    found: dict[str, tuple[str, str]] = {}
    left = [name for name in names() if options.part in name]
    while left:
        job, said = place / "names.json", place / "said.jsonl"
        job.write_text(json.dumps(left))
        said.write_text("")
        launch = [os.fspath(ROOT / "install" / "launch.sh"), str(options.ranks), sys.executable]
        done = subprocess.run(
            [*launch, "-m", MODULE, "--job", os.fspath(job), "--backend", options.backend],
            cwd=ROOT,
            env={
                **os.environ,
                "BACKEND": "gloo",  # which tests there are
                "WORLD_SIZE": str(options.ranks),
                "GLOO_SOCKET_IFNAME": "lo",
                "TEMP_DIR": os.fspath(place),
                "HPCZERO_TIMEOUT": str(LIMIT_S / 2),
            },
            capture_output=True,
            text=True,
            check=False,
        )
        lines = [json.loads(line) for line in said.read_text().splitlines()]
        ended = {line["test"]: line for line in lines if line["kind"] == "end"}
        found |= {name: (line["verdict"], line["words"]) for name, line in ended.items()}
        rest = [name for name in left if name not in ended]
        if rest:  # the first of them took the job down
            failed = {x["test"]: x["words"] for x in lines if x["kind"] == "failed"}
            words = f"ended the job: {done.stderr.strip()[-300:]}"
            found[rest[0]] = ("failed", failed.get(rest[0]) or words)
        left = rest[1:]
        new = [f"{name}: {found[name][1]}" for name in found if found[name][0] == "failed"][-3:]
        sys.stderr.write(f"{len(found)} done, {len(left)} left; failed last: {new}\n")
    return found


def show(found: dict[str, tuple[str, str]], options: argparse.Namespace) -> None:
    """Print counts, and a line for each test that has not passed."""
    import torch

    verdicts: dict[str, list[str]] = {"passed": [], "failed": [], "not applicable": []}
    reasons: Counter[str] = Counter()
    for name, (verdict, words) in sorted(found.items()):
        apart = next((why for part, why in NOT_APPLICABLE.items() if part in name), "")
        if verdict == "failed" and apart:
            verdict, words = "not applicable", apart
        verdicts[verdict].append(f"{name}: {words}")
        if verdict == "not applicable":
            reasons[words] += 1
    counts = ", ".join(f"{len(names)} {verdict}" for verdict, names in verdicts.items())
    sys.stdout.write(
        f"torch {torch.__version__}, {len(found)} tests over {options.backend}, {options.ranks} ranks: {counts}\n"
    )
    for words, number in reasons.most_common():
        sys.stdout.write(f"  not applicable: {number} x {words}\n")
    for line in verdicts["failed"]:
        sys.stdout.write(f"  failed: {line}\n")


def names() -> list[str]:
    """All tests, in torch's order."""
    os.environ.setdefault("BACKEND", "gloo")
    os.environ.setdefault("WORLD_SIZE", str(RANKS))
    from torch.testing._internal.distributed.distributed_test import DistributedTest

    return [name for name in dir(DistributedTest._DistTestBase) if name.startswith("test_")]


# --- inside a job


def run_job(job: Path, backend: str) -> int:
    """One rank: run the tests of ``job``, until ranks do not come to the end of one. Collective over MPI's world."""
    import torch
    from mpi4py import MPI
    from torch.testing._internal.distributed import distributed_test

    comm, said = MPI.COMM_WORLD.Dup(), job.with_name("said.jsonl")
    cases = type(
        "Cases",
        (distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase),
        {},
    )

    def say(**line: object) -> None:
        with said.open("a") as file:
            file.write(json.dumps(line) + "\n")

    for name in json.loads(job.read_text()):
        if comm.rank == 0:
            for folder in ("barrier", "test_dir", "init_dir"):
                (job.parent / folder).mkdir(exist_ok=True)
            (job.parent / f"file-{name}").unlink(missing_ok=True)
            (job.parent / "barrier" / "1").unlink(missing_ok=True)
            distributed_test.Barrier.init()
        distributed_test.Barrier.barrier_id = 0
        torch.manual_seed(0)  # processes of torch's CI start with equal streams
        comm.Barrier()
        verdict, words = "failed", ""
        ended = threading.Event()
        threading.Thread(target=_give_up, args=(ended, LIMIT_S), daemon=True).start()
        try:
            with _started(comm, backend):
                case = cases(name)
                case.rank, case.file_name = comm.rank, os.fspath(job.parent / f"file-{name}")
                verdict, words = _verdict(getattr(case, name))
                if verdict == "failed":  # the others may wait for this rank, also where groups end
                    say(kind="failed", test=name, words=f"rank {comm.rank}: {words}"[:400])
                    threading.Thread(target=_give_up, args=(ended, AFTER_S), daemon=True).start()
        except BaseException as error:  # of a test, whatever it is
            words = words or f"at its end: {type(error).__name__}: {error}"
            verdict = "failed"
            threading.Thread(target=_give_up, args=(ended, AFTER_S), daemon=True).start()
        all_said = comm.allgather((verdict, words))
        ended.set()
        worst = next((one for one in all_said if one[0] == "failed"), all_said[0])
        if comm.rank == 0:
            say(kind="end", test=name, verdict=worst[0], words=worst[1][:400])
    return 0


def _verdict(test: Callable[[], object]) -> tuple[str, str]:
    from torch.testing._internal.common_distributed import TEST_SKIPS

    try:
        test()
    except unittest.SkipTest as error:
        return "not applicable", str(error)
    except SystemExit as error:
        for skip in TEST_SKIPS.values():
            if skip.exit_code == error.code:
                return "not applicable", skip.message
        return ("passed", "") if not error.code else ("failed", f"exit {error.code}")
    except BaseException as error:
        line = " ".join(str(error).split())
        return "failed", f"{type(error).__name__}: {line}"[:300]
    return "passed", ""


def _started(comm: Any, backend: str) -> AbstractContextManager[None]:
    from tests.helpers.gloo import gloo

    return gloo(comm) if backend == "gloo" else _bridged(comm)


@contextmanager
def _bridged(comm: Any) -> Iterator[None]:
    import torch.distributed as dist

    import hpczero.bridge

    hpczero.bridge.init(comm)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _give_up(ended: threading.Event, limit_s: float) -> None:
    if not ended.wait(limit_s):
        os._exit(3)


if __name__ == "__main__":
    sys.exit(main())
