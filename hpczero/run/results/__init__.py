"""What a run leaves: its folder, metrics, plots, final weights, and what is on the screen meanwhile."""
