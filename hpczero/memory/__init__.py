"""Memory: flat buffers that can be given back and taken again, the ledger of what is held, the C library's heap."""
