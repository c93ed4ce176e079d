"""Models whose code lies in their folder, with a buffer that they compute; and Llamas of which ranks hold parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

import hpczero
from hpczero.errors import ConfigError
from hpczero.parallel import llama_rule, split
from tests.foreign import llama
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import raises_on_all

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.filterwarnings("ignore", "error:::hpczero"),
]

CODE = """
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel


class WavyConfig(PretrainedConfig):
    model_type = "wavy"

    def __init__(self, width=6, **options):
        self.width = width
        super().__init__(**options)


class WavyModel(PreTrainedModel):
    config_class = WavyConfig

    def __init__(self, config):
        super().__init__(config)
        self.inner = nn.Linear(config.width, config.width + 1)
        self.outer = nn.Linear(config.width + 1, config.width)
        self.register_buffer("waves", torch.arange(float(config.width)).cos(), persistent=False)
        self.post_init()

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(x * self.waves)))
"""


def write(folder: Path, seed: int = 4) -> Any:
    """A model of such a folder, as transformers loads it."""
    folder.mkdir()
    (folder / "modeling_wavy.py").write_text(CODE)
    places = {f"Auto{kind}": f"modeling_wavy.Wavy{kind}" for kind in ("Config", "Model")}
    content = {"model_type": "wavy", "architectures": ["WavyModel"], "auto_map": places, "width": 7}
    (folder / "config.json").write_text(json.dumps(content))
    library = llama.library()
    config = library.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    torch.manual_seed(seed)
    model = library.AutoModel.from_config(config, trust_remote_code=True)
    save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})
    return model.eval()


@pytest.mark.ranks(1, 2, 3)
def test_code_of_the_folder_is_run_where_it_is_trusted(
    comm: MPI.Intracomm, topology: Topology, folder: Path
) -> None:
    plain = write(folder / "a") if comm.rank == 0 else None
    comm.Barrier()
    raises_on_all(comm, ConfigError, "custom code", llama.sharded, topology, folder / "a")
    model, _ = llama.sharded(topology, folder / "a", trust_remote_code=True)
    x = torch.ones(2, 7)
    with torch.no_grad():
        found = model(x)
    hpczero.hf.save_pretrained(model, folder / "b")
    hpczero.release(model)
    wrong = ""
    if plain is not None:
        with torch.no_grad():
            wrong = "" if torch.equal(found, plain(x)) else "output"
        # Of parameters: from_pretrained leaves the buffer, which only __init__ computes, without values.
        again = llama.library().AutoModel.from_pretrained(folder / "b", trust_remote_code=True)
        same = zip(plain.parameters(), again.parameters(), strict=True)
        wrong += "" if all(torch.equal(a, b) for a, b in same) else ", saved"
    parallel_assert(comm, not wrong, wrong)


@pytest.mark.ranks(2)
def test_ranks_that_share_layers_read_their_parts_and_save_the_whole(
    comm: MPI.Intracomm, folder: Path
) -> None:
    options: Any = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 16}
    llama.on_disk(comm, folder / "a", **options)
    topology = hpczero.Topology.create(comm, mesh=hpczero.Mesh(tensor=2))
    model, weights = hpczero.hf.load(folder / "a", topology=topology)
    split(model, topology, llama_rule(model.config))
    hpczero.zeroify(model, None, topology=topology, initialize=weights)
    ids = llama.tokens()
    with torch.no_grad():
        found = model(input_ids=ids).logits
    hpczero.hf.save_pretrained(model, folder / "b")
    hpczero.release(model)
    topology.free()
    wrong = ""
    if comm.rank == 0:
        plain = llama.made(**options)
        apart = float((plain(input_ids=ids).logits - found).detach().abs().max())
        wrong = "" if apart < 1e-6 else f"logits differ by {apart}"
        again = llama.library().AutoModelForCausalLM.from_pretrained(folder / "b")
        same = zip(plain.parameters(), again.parameters(), strict=True)
        wrong += "" if all(torch.equal(a, b) for a, b in same) else ", saved"
    parallel_assert(comm, not wrong, wrong)
