"""Calls: how far a forward or a backward has come, and what goes into modules and comes out of them."""
