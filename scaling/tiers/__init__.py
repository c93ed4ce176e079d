"""What a memory tier costs: ``python -m scaling.tiers``."""
