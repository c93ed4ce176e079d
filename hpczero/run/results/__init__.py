"""What a run leaves: its folder, metrics, plots, final weights, and what it shows on the screen."""
