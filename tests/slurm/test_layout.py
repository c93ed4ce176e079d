"""The 60 B job in the paper's layout: which ranks share what follows from the nodes. No SLURM is needed to show it."""

from __future__ import annotations

import sys

import pytest

from tests.helpers.mpirun import ROOT, Finished, run_command

SIZES = ("NODES", "RANKS_PER_NODE", "GPUS_PER_NODE", "CPUS_PER_RANK")


def dry_run(*arguments: str, script: str = "train_60b.sh", **variables: str) -> Finished:
    cleared = dict.fromkeys(SIZES, "")
    given = {**cleared, "DRY_RUN": "1", "PYTHON": sys.executable, **variables}
    return run_command(["bash", ROOT / "slurm" / script, *arguments], 60, given)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ("shard 25 x tensor 16", "stage 2 *", "global batch 1600")),
        # Half the node: what is left of 16 are two stages of a pipeline.
        (
            {"RANKS_PER_NODE": "8", "NODES": "50"},
            ("pipeline 2 x shard 25 x tensor 8", "8 micro-batch(es) of 8", "global batch 1600"),
        ),
        # 6 ranks of a node and 4 have only 2 in common.
        (
            {"RANKS_PER_NODE": "6", "NODES": "50", "MODEL_PARALLEL": "4", "MEMORY": "200GB"},
            ("pipeline 2 x shard 75 x tensor 2", "8 micro-batch(es) of 2", "global batch 1200"),
        ),
    ],
)
def test_layers_are_shared_as_far_as_the_node_goes(
    variables: dict[str, str], expected: tuple[str, ...]
) -> None:
    shown = dry_run(**{"MODEL_PARALLEL": "16", **variables})
    assert shown.returncode == 0, shown
    for part in expected:
        assert part in shown.stdout


def test_without_model_parallelism_it_is_zero_alone() -> None:
    shown = dry_run()
    assert shown.returncode == 0, shown
    assert "400 ranks on 25 nodes of 16" in shown.stdout
    assert "tensor" not in shown.stdout


@pytest.mark.parametrize("script", ["train.sh", "train_60b.sh"])
def test_options_of_the_run_are_checked_before_the_queue(script: str) -> None:
    refused = dry_run("--train.step", "5", script=script)
    assert refused.returncode == 78, refused
    assert "Unrecognized options: --train.step" in refused.stderr
    assert "sbatch" not in refused.stdout


def test_layout_that_does_not_fit_is_refused() -> None:
    refused = dry_run(MODEL_PARALLEL="16", MEMORY="10GB")
    assert refused.returncode == 78
    said = "--stage 2 in this layout needs 19.5 GB per rank, and 10.0 GB are there"
    assert said in refused.stderr
