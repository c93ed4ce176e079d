"""Work: one started operation, and what becomes of it.

Owns: who hears that it has failed or was cut off. Must not know: what the operation does.
"""

from __future__ import annotations

from collections.abc import Callable

from hpczero.errors import CommError


class Work:
    """A started operation. ``wait`` returns when its buffers may be used again; it may be called twice."""

    def __init__(
        self, name: str, finish: Callable[[], None] | None = None, *, elsewhere: bool = False
    ) -> None:
        """Not collective.

        Args:
            name: of the unit.
            finish: what is left to do; None: nothing.
            elsewhere: whether ``finish`` only waits for what another thread does. A wait that is cut off, by a signal
                handler that raises, is then begun anew.
        """
        self.name = name
        self._finish = finish
        self._elsewhere = elsewhere

    def wait(self) -> None:
        """Block until the operation is complete on this rank.

        Raises:
            CommError: the operation failed, or an exception cut it off; at every call from then on.
        """
        finish, self._finish = self._finish, None
        if finish is None:
            return
        try:
            finish()
        except BaseException as error:
            self._finish = finish if self._elsewhere else self._failing(error)
            raise

    def _failing(self, error: BaseException) -> Callable[[], None]:
        def fail() -> None:
            if isinstance(error, CommError):
                raise error
            raise CommError(
                f"what was sent of {self.name!r} never arrived, because {type(error).__name__} ({error}) cut the "
                "operation off; end the program and go on from a checkpoint"
            ) from error

        return fail
