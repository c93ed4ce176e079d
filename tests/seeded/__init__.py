"""Seeded faults: what the core of the suite would find of bugs that somebody might make. Not part of ``make test``."""
