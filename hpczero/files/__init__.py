"""Files: names and bytes that are on the disk when a call returns; files of anybody's that are opened with care.

Knows neither MPI nor torch.
"""
