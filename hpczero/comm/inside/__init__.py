"""Inside a node: ways in which the ranks of one node gather and reduce. ``level`` is the contract."""
