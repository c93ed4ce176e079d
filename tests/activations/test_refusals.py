"""What saves nothing or cannot work is refused with the reason; the rest says where inputs are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hpczero.activations import Checkpointing
from hpczero.errors import PlanError, TierError
from tests.activations.stacks import WIDTH, Stack, batch, on_disk, on_host


def test_what_saves_nothing_is_refused_with_the_reason(tmp_path):
    with pytest.raises(PlanError, match=r"host.*same memory.*nothing would be saved"):
        Checkpointing.create("host")
    with pytest.raises(PlanError, match="without a folder"):
        Checkpointing.create("disk")
    with on_disk(tmp_path) as checkpointing:
        embedding = nn.Embedding(10, WIDTH)
        with pytest.raises(PlanError, match=r"Embedding.*floating-point.*nothing is saved"):
            checkpointing(embedding, torch.arange(10))
        with pytest.raises(PlanError, match="nothing is saved"):
            checkpointing(lambda state: state["x"] * 2, {"x": batch()})


def test_inputs_on_another_device_are_refused(tmp_path):
    class Elsewhere(torch.nn.Module):
        pass

    with on_disk(tmp_path) as checkpointing:
        checkpointing._device = torch.device("cuda:0")
        with pytest.raises(PlanError, match=r"Linear are on cpu, expected cuda:0"):
            checkpointing(nn.Linear(WIDTH, WIDTH), batch())


def test_small_inputs_stay_where_they_are(tmp_path):
    with on_disk(tmp_path) as checkpointing:
        x = torch.ones(10, requires_grad=True) * 2
        y = checkpointing(torch.sin, x)
        y.sum().backward()
        assert checkpointing.kept_peak_nbytes == 0
        assert checkpointing.traffic.written_nbytes == 0


def test_a_closed_one_is_named(tmp_path):
    checkpointing = on_disk(tmp_path)
    model = Stack(call=checkpointing)
    loss = model(batch())
    checkpointing.close()
    checkpointing.close()
    with pytest.raises(TierError, match="closed"):
        loss.backward()
    with pytest.raises(TierError, match="closed"):
        model(batch())


def test_descriptions_say_where(tmp_path):
    with on_disk(tmp_path) as disk, on_host(tmp_path) as host:
        assert str(tmp_path) in disk.describe()
        assert "host" in host.describe()
        assert disk.staging_nbytes >= 4 * 4096
    device = Checkpointing.create()
    assert device.describe() == "on the device"
    assert device.staging_nbytes == device.kept_nbytes == 0
