"""Own tensor and pipeline parallelism beside torch's: ``python -m scaling.parallel``."""
