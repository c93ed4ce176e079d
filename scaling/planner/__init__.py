"""The planner held against training: is its choice the fastest, and does a step take as long as predicted?"""
