"""Loading: any map-style data set through torch's own ``DataLoader``, with an exact resume on any number of ranks.

This room needs torch; the rest of ``data`` does not.
"""

from __future__ import annotations

from hpczero.data.loading.resumable import GlobalBatches, ResumableLoader, Share
from hpczero.data.loading.tar_shards import TarShards

__all__ = ["GlobalBatches", "ResumableLoader", "Share", "TarShards"]
