"""One training run: the loop, its batches, its checkpoints. The rooms below say how it starts, stops, and what it leaves."""
