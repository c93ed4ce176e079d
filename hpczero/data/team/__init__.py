"""Team: the ranks that make one token file together, or one process alone. ``base`` has the contract."""
