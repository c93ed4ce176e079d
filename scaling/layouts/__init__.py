"""Layouts of ranks compared with one another: steps predicted and seen, bytes."""
