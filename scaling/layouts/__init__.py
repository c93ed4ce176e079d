"""Layouts of ranks held against each other: steps predicted and seen, bytes."""
