"""Which device a rank takes, what is refused, and what memory other processes can map."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

from hpczero.accelerator import HostAccelerator, accelerator_of, choose_accelerator, host
from hpczero.accelerator.choice import check_allocator, device_index
from hpczero.errors import CommError, ConfigError
from hpczero.options.environment import Environment

NO_DEVICE = not torch.cuda.is_available()


@pytest.mark.skipif(not NO_DEVICE, reason="there is a CUDA device")
def test_without_a_device_auto_is_the_host_and_cuda_is_refused():
    assert choose_accelerator().is_host
    with pytest.raises(ConfigError, match="cuda was asked for, and torch sees none"):
        choose_accelerator("cuda")


def test_unknown_devices_are_refused():
    with pytest.raises(ConfigError, match="got 'tpu'"):
        choose_accelerator("tpu")
    with pytest.raises(ConfigError, match="expected cpu or cuda"):
        accelerator_of(torch.device("xpu"))
    assert accelerator_of(torch.device("meta")).is_host


@pytest.mark.parametrize(
    ("local_rank", "count", "expected"), [(0, 4, 0), (3, 4, 3), (5, 4, 1), (2, 1, 0), (None, 1, 0)]
)
def test_device_of_a_rank_is_that_of_its_place_on_the_node(local_rank, count, expected):
    assert device_index(local_rank, count) == expected


def test_without_a_place_and_with_several_devices_the_launcher_is_asked_for():
    with pytest.raises(ConfigError, match="does not say which rank of the node"):
        device_index(None, 4)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"SLURM_LOCALID": "3"}, 3),
        ({"SLURM_LOCALID": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}, 2),  # mpirun inside sbatch
        ({"MPI_LOCALRANKID": "1"}, 1),
        ({"PALS_LOCAL_RANKID": "6"}, 6),
        ({"SLURM_LOCALID": "none"}, None),
    ],
)
def test_place_on_the_node_as_launchers_tell_it(variables, expected):
    assert Environment.read(variables).local_rank == expected


@pytest.mark.parametrize("settings", ["", "max_split_size_mb:128", "expandable_segments:False"])
def test_allocators_that_can_share_pass(settings):
    check_allocator([("PYTORCH_CUDA_ALLOC_CONF", settings)])


@pytest.mark.parametrize(
    "settings",
    ["expandable_segments:True", "a:1, Expandable_Segments: true", "backend:cudaMallocAsync"],
)
def test_allocators_that_cannot_share_are_refused(settings):
    good, bad = "max_split_size_mb:128", settings
    for name, value in (("PYTORCH_CUDA_ALLOC_CONF", bad), ("PYTORCH_ALLOC_CONF", bad)):
        # Torch reads one of two; which one is not for us to guess.
        both = dict.fromkeys(("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), good)
        for variables in ({name: value}, {**both, name: value}):
            with pytest.raises(ConfigError, match=f"^{name}={re.escape(value)}: memory"):
                check_allocator(Environment.read(variables).cuda_allocators)
    check_allocator(Environment.read(both).cuda_allocators)


READER = """
import sys
from hpczero.accelerator import HostAccelerator
peer = HostAccelerator().attach(sys.argv[1].encode(), int(sys.argv[2]))
peer.memory[1] = peer.memory[0] + 1
"""


def test_exported_memory_is_seen_by_another_process_and_leaves_no_file():
    block = HostAccelerator().export(100)
    block.memory[0] = 41
    command = [sys.executable, "-c", READER, block.ticket.decode(), "100"]
    subprocess.run(command, check=True)
    assert block.memory[1] == 42
    block.seal()
    assert block.ticket.decode() not in os.listdir(host.FOLDER)
    with pytest.raises(CommError, match="must see the same"):
        HostAccelerator().attach(block.ticket, 100)
    block.close()


def said_by(script: str) -> str:
    """What a new interpreter prints."""
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_nothing_of_cuda_is_loaded_without_a_device():
    """Not CuPy, and no context: the package runs where there is neither."""
    script = (
        "import sys, torch, hpczero.zero.zeroify, hpczero.accelerator, hpczero.kernels.tree_sum; "
        "print('cupy' in sys.modules, 'hpczero.accelerator.cuda' in sys.modules, torch.cuda.is_initialized())"
    )
    assert said_by(script).split() == ["False", "False", "False"]


def test_a_training_of_ones_own_loads_neither_the_command_line_nor_hdf5():
    """``zeroify`` costs a process what it needs; the commands and checkpoints bring the rest."""
    script = (
        "import sys, hpczero; hpczero.zeroify; "
        "print([name for name in ('tyro', 'hpczero.options.config', 'h5py') if name in sys.modules])"
    )
    assert said_by(script) == "[]\n"
