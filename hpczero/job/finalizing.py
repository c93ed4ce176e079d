"""The end of MPI in this process: what is done before it, whoever calls ``MPI.Finalize()``.

Owns: the attribute of MPI.COMM_SELF, which MPI deletes first as it ends. Must not know: what is done.
"""

from __future__ import annotations

from collections.abc import Callable

from mpi4py import MPI

_before: list[Callable[[], None]] = []


def before_finalize(call: Callable[[], None]) -> None:
    """Have ``call`` called once, as MPI ends, while messages still move. Not collective.

    What was asked for last comes first. HDF5 ends in the same way: whoever writes by it asks once it is loaded.
    """
    if call not in _before:
        _before.append(call)
        MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=lambda *_: call()), True)
