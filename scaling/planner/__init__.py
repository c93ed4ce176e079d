"""The planner compared with training: is its choice the fastest, and does a step take as long as predicted?"""
