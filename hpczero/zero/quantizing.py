"""Quantizing: in which form a model's frozen matrices rest and travel, and where that cannot be.

Owns: the refusals. Must not know: units, how codes are made.
"""

from __future__ import annotations

from hpczero.errors import PlanError
from hpczero.job.topology import Topology
from hpczero.plan import Stage
from hpczero.plan.layout import Codec


def codec_of(
    quantize: str | None, stage: Stage, topology: Topology, *, secondary: bool
) -> Codec | None:
    """The form by its name; None for the parameters' own dtype.

    Raises:
        ConfigError: there is no such form.
        PlanError: parameters stay whole, are cut in two ways, or nodes keep a copy; says what to do.
    """
    codec = Codec.of(quantize)
    if codec is None:
        return None
    if not stage.shards_parameters:
        raise PlanError(
            f"quantize: stage {int(stage)} keeps parameters whole, and codes are for sharded ones; use stage=3, or "
            "leave it out"
        )
    if topology.tensor.size > 1:
        raise PlanError(
            f"quantize: {topology.tensor.size} tensor ranks have parts of each matrix, whose blocks would not be those "
            "of the whole; use a mesh without tensor parallelism, or leave it out"
        )
    if secondary:
        raise PlanError(
            "quantize: with secondary=True nodes keep gathered parameters, and codes are not kept so; leave one of the "
            "two out"
        )
    return codec
