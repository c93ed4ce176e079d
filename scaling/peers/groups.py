"""Groups of contenders that fit into memory together.

Owns: who shares a round. Must not know: how anything is measured. Times of different groups are never divided by each
other, so every group holds the contenders the others are compared with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpczero.errors import ConfigError


def make_groups(
    needs: Mapping[str, int], anchors: Sequence[str], limit_nbytes: int
) -> list[list[str]]:
    """Split the contenders so that each group, anchors included, fits; as few groups as first fit finds.

    Args:
        needs: bytes of all ranks together, by contender; groups keep this order.
        anchors: contenders that are in every group; those not in ``needs`` are ignored.
        limit_nbytes: what one group may take.

    Raises:
        ConfigError: the anchors with one other contender do not fit.
    """
    shared = [name for name in needs if name in anchors]
    left = limit_nbytes - sum(needs[name] for name in shared)
    others: list[list[str]] = []
    for name in needs:
        if name in shared:
            continue
        fitting = [g for g in others if sum(needs[n] for n in g) + needs[name] <= left]
        if needs[name] > left:
            raise ConfigError(
                f"{name} and {', '.join(shared)} need {(limit_nbytes - left + needs[name]) / 2**30:.1f} GiB together, "
                f"{limit_nbytes / 2**30:.1f} GiB may be used; name fewer with --contenders, or end other programs"
            )
        if fitting:
            fitting[0].append(name)
        else:
            others.append([name])
    if left < 0:
        raise ConfigError(
            f"{', '.join(shared)} need {(limit_nbytes - left) / 2**30:.1f} GiB together, "
            f"{limit_nbytes / 2**30:.1f} GiB may be used; name fewer with --contenders, or end other programs"
        )
    members = [{*shared, *group} for group in others] or [set(shared)]
    return [[name for name in needs if name in group] for group in members]
