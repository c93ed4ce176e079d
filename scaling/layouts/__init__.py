"""Layouts of ranks held against each other: a step foretold and seen, bytes planned and seen, idle time of pipelines."""
