"""Files: names and bytes that are on the disk when a call returns; other programs' files, opened with care.

Knows neither MPI nor torch.
"""
