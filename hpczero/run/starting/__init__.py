"""How a run starts: the first seconds, what is refused before anything is allocated, where it begins."""
