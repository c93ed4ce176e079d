"""hpczero beside its peers: ``python -m scaling.peers``."""
