"""Bytes of optimizer state that the plan command says, and those that training holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from hpczero.models.config import GPTConfig
from hpczero.plan.__main__ import Options, build_report
from hpczero.predict.answer import as_json
from tests.helpers.parallel import parallel_assert

if TYPE_CHECKING:
    from mpi4py import MPI

    import hpczero


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_bytes_of_moments_in_8_bits_are_those_that_training_holds(
    comm: MPI.Intracomm, topology: hpczero.Topology
) -> None:
    """At every stage, of the model that the options describe."""
    sizes = GPTConfig(layers=2, hidden=24, heads=2, vocab_size=61, context=8)
    options = Options(
        ranks=comm.size,
        memory="1GB",
        layers=2,
        hidden=24,
        heads=2,
        vocab=61,
        sequence=8,
        precision="fp32",
        optimizer="adamw8bit",
    )
    report = as_json(build_report(options))
    import hpczero
    from hpczero.models.gpt import GPT

    wrong = []
    for stage, row in enumerate(cast("list[dict[str, Any]]", report["stages"])):
        model = GPT(sizes)
        stepping = hpczero.optim.AdamW8bit(model.parameters(), lr=1e-3)
        hpczero.zeroify(model, stepping, stage=stage, topology=topology, transport="flat")
        tokens = torch.zeros((2, 8), dtype=torch.int64)
        model(tokens, tokens).backward()
        stepping.step()
        held = hpczero.sharding(model).optimizer_nbytes()
        if held != row["memory"]["optimizer"]:
            wrong.append(f"stage {stage}: {held} held, {row['memory']['optimizer']} planned")
        hpczero.release(model)
    parallel_assert(comm, report["optimizer"] == "adamw8bit" and not wrong, f"{wrong}")
