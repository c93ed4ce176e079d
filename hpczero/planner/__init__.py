"""The planner: with which settings a model trains fastest within the memory that there is."""
