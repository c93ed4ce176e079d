"""Evidence: what every measurement needs to be believed. Records, spread, tables, plots, clocks, memory, neighbours.

Knows nothing of what is measured.

"""
