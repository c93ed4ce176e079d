"""Store: keys and values that all ranks of the default group see, kept by its first rank.

Owns: the messages of questions and answers, and the thread that answers. Must not know: who asks what.

torch gives each backend a store by which its ranks find each other. The bridge's own groups ask it nothing. Others do:
gloo beside the bridge, and what torch builds on keys. Rank 0 looks for questions often while some come, and seldom
otherwise. A rank that waits for a key asks again and again, so nobody's question waits behind it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from mpi4py import MPI
from torch.distributed import Store  # type: ignore[attr-defined]
from typing_extensions import override

from hpczero.errors import CommError

QUESTION, ANSWER = 1, 2  # tags
OFTEN_S, SELDOM_S = 0.5e-3, 0.2
LIVELY_S = 1.0  # how long after a question rank 0 looks often
AGAIN_S = 10e-3  # between questions for a key that is not there yet


class Kept:
    """The keys and values themselves."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def ask(self, verb: str, *arguments: Any) -> Any:
        """Do what a rank asks for."""
        with self._lock:
            return getattr(self, f"_{verb}")(*arguments)

    def _set(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def _get(self, key: str) -> bytes:
        return self._values[key]

    def _add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """As torch's own stores: a key that is not there is set where nothing is expected."""
        if self._values.get(key, b"") == expected:
            self._values[key] = desired
        return self._values.get(key, expected)

    def _check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def _delete(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def _count(self) -> int:
        return len(self._values)


class MPIStore(Store):
    """A store of torch over MPI."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        """Not collective. Rank 0 starts to answer.

        Args:
            comm: the ranks; carries nothing else. ``close`` frees it.
        """
        super().__init__()
        self._comm, self._lock = comm, threading.Lock()
        self._kept = Kept()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        if comm.rank == 0 and comm.size > 1:
            self._thread = threading.Thread(
                target=self._answer, name="hpczero-bridge-store", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """Stop to answer, when no rank asks any more. Collective."""
        self._comm.Barrier()
        self.stop()
        self._comm.Free()

    def stop(self) -> None:
        """Stop to answer. Not collective."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    @override
    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, _as_bytes(value))

    @override
    def get(self, key: str) -> bytes:
        self.wait([key])
        return bytes(self._ask("get", key))

    @override
    def add(self, key: str, value: int) -> int:
        return int(self._ask("add", key, value))

    @override
    def compare_set(self, key: str, expected_value: Any, desired_value: Any) -> bytes:
        expected, desired = _as_bytes(expected_value), _as_bytes(desired_value)
        return bytes(self._ask("compare_set", key, expected, desired))

    @override
    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", list(keys)))

    @override
    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return when all ``keys`` are there.

        Raises:
            CommError: they are not within ``timeout``, or within that of the store.
        """
        limit_s = (timeout or self.timeout).total_seconds()  # type: ignore[attr-defined]
        deadline = time.monotonic() + limit_s
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise CommError(
                    f"wait timeout: no rank has set all of the keys {list(keys)} within {limit_s:g} s; another rank "
                    "has not come to the call that sets them"
                )
            time.sleep(AGAIN_S)

    @override
    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", key))

    @override
    def num_keys(self) -> int:
        return int(self._ask("count"))

    deleteKey, getNumKeys = delete_key, num_keys

    def _ask(self, verb: str, *arguments: Any) -> Any:
        if self._comm.rank == 0:
            return self._kept.ask(verb, *arguments)
        with self._lock:  # one question of a rank at a time
            self._comm.send((verb, arguments), 0, tag=QUESTION)
            _until(lambda: self._comm.iprobe(0, tag=ANSWER), OFTEN_S)
            return self._comm.recv(source=0, tag=ANSWER)

    def _answer(self) -> None:
        status, asked = MPI.Status(), time.monotonic()
        pending: list[tuple[MPI.Request, Any]] = []
        while not self._over.is_set():
            if not self._comm.iprobe(tag=QUESTION, status=status):
                lively = time.monotonic() - asked < LIVELY_S
                self._over.wait(OFTEN_S if lively else SELDOM_S)
                continue
            asked = time.monotonic()
            verb, arguments = self._comm.recv(source=status.Get_source(), tag=QUESTION)
            found = self._kept.ask(verb, *arguments)
            pending = [(request, kept) for request, kept in pending if not request.Test()]
            pending.append((self._comm.isend(found, status.Get_source(), tag=ANSWER), found))


def _until(done: Callable[[], bool], nap_s: float) -> None:
    while not done():
        time.sleep(nap_s)


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
