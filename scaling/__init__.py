"""Measurements of hpczero beside others; every figure comes with the machine, the commit and the spread."""
