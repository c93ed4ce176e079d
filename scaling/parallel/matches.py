"""Which layouts are compared, and by whom they are trained.

Owns: the pairs. Must not know: how ranks are started, the order of a run, torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from scaling.contenders import Entry
from scaling.contenders.workload import Workload

TENSOR_GOAL, PIPELINE_GOAL = 0.8, 0.9  # of torch's time, at most (issue 19)


@dataclass(frozen=True)
class Match:
    """One layout, trained by both.

    Attributes:
        name: in tables and on the command line.
        own: hpczero.
        other: torch.
        workload: of one rank with samples of its own.
        goal: own time over torch's, at most.
    """

    name: str
    own: Entry
    other: Entry
    workload: Workload
    goal: float


def matches_of(
    workload: Workload, *, ranks: int, micro_batches: int, stage: int, precision: str
) -> list[Match]:
    """Tensor parallelism over all ranks and over half of them, with and without sequence parallelism; then pipelines.

    Degrees of 1 are left out; pipelines are compared in fp32 alone, and have a sample for each micro-batch.

    Args:
        workload: of one rank with samples of its own.
        ranks: of each contender.
        micro_batches: of a pipeline.
        stage: of ZeRO over the ranks that share no layer.
        precision: of parameters and activations.
    """
    degrees = [degree for degree in dict.fromkeys((ranks, ranks // 2)) if degree > 1]
    found = []
    for degree in degrees:
        for sequence in (0, 1):
            name = f"tensor-{degree}{'-sequence' if sequence else ''}"
            words: dict[str, int | str] = {
                "tensor": degree,
                "sequence": sequence,
                "precision": precision,
            }
            own = Entry(
                f"hpczero-{name}",
                "hpczero",
                "hpczero_layout",
                "mpi",
                arguments={**words, "stage": stage},
            )
            other = Entry(f"dtensor-{name}", "torch DTensor", "dtensor", "gloo", arguments=words)
            found.append(Match(name, own, other, workload, TENSOR_GOAL))
    if precision != "fp32":
        return found
    samples = -(-workload.sequences // micro_batches) * micro_batches
    for degree in degrees:
        name = f"pipeline-{degree}"
        words = {"pipeline": degree, "micro_batches": micro_batches}
        own = Entry(
            f"hpczero-{name}",
            "hpczero",
            "hpczero_layout",
            "mpi",
            arguments={**words, "stage": stage},
        )
        title = "torch pipelining"
        other = Entry(f"torch-{name}", title, "torch_pipeline", "gloo", arguments=words)
        found.append(Match(name, own, other, replace(workload, sequences=samples), PIPELINE_GOAL))
    return found
