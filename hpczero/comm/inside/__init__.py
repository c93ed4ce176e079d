"""Inside a node: ways by which the ranks of one node gather and reduce. ``level`` is the contract."""
