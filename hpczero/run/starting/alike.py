"""Whether all ranks of a run were started with the same options.

Owns: the comparison. Must not know: what any option means.
"""

from __future__ import annotations

import zlib

from hpczero.errors import ConfigError
from hpczero.job.topology import Topology
from hpczero.options.config import RunConfig
from hpczero.options.reading import to_toml


def check_same_options(config: RunConfig, topology: Topology) -> None:
    """Refuse ranks that were started with other options: they would train another model. Collective.

    Raises:
        ConfigError: on every rank; the message names the ranks that differ from rank 0.
    """
    mine = float(zlib.crc32(to_toml(config).encode()))
    first = topology.gather(mine)[0]
    with topology.agreed("agree on the options"):
        if mine != first:
            raise ConfigError(
                "got other options than rank 0; give every rank the same command line and file"
            )
