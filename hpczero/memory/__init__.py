"""Memory: flat buffers that can be given back and taken again, the ledger of what is held, and the C library's heap."""
