"""Layouts of ranks held against each other: steps foretold and seen, bytes."""
