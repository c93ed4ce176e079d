"""How a command ends."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("lines", [1, 100_000])  # fits into the pipe's buffers; does not
def test_command_piped_into_a_reader_that_leaves_says_nothing(lines: int) -> None:
    program = (
        "import sys; sys.stdin.read(); from hpczero import errors\n"
        f"def main():\n    for number in range({lines}):\n        print(number)\n"
        "errors.run(main)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as command:
        assert command.stdin
        assert command.stdout
        assert command.stderr
        command.stdout.close()  # the reader has left before the first line
        command.stdin.close()
        said = command.stderr.read().decode()
        assert (command.wait(60), said) == (141, "")


def test_broken_pipe_that_is_not_our_output_is_an_error() -> None:
    program = (
        "from hpczero import errors\n"
        "def main():\n    raise BrokenPipeError('the loader died')\n"
        "errors.run(main)"
    )
    command = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert command.returncode == 1
    assert "BrokenPipeError: the loader died" in command.stderr
