"""Models whose code lies in their folder, with a buffer that they compute; and Llamas of which ranks hold parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import hpczero
from hpczero.errors import ConfigError
from hpczero.parallel import llama_rule, split
from tests.foreign import llama
from tests.helpers.small_models import same
from tests.helpers.world import World

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
def test_code_of_the_folder_is_run_where_it_is_trusted(world: World) -> None:
    plain = write(world.folder / "a") if world.rank == 0 else None
    world.comm.Barrier()
    world.raises(ConfigError, "custom code", llama.sharded, world, "a")
    model, _ = llama.sharded(world, "a", trust_remote_code=True)
    x = torch.ones(2, 7)
    with torch.no_grad():
        found = model(x)
    hpczero.hf.save_pretrained(model, world.folder / "b")
    hpczero.release(model)

    def judge() -> None:
        assert plain is not None
        with torch.no_grad():
            assert torch.equal(found, plain(x))
        # Of parameters: from_pretrained leaves the buffer, which only __init__ computes, without values.
        again = llama.library().AutoModel.from_pretrained(
            world.folder / "b", trust_remote_code=True
        )
        assert same(plain.parameters(), again.parameters())

    world.on_root(judge)


@pytest.mark.ranks(2)
def test_ranks_that_share_layers_read_their_parts_and_save_the_whole(world: World) -> None:
    options: Any = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 16}
    llama.on_disk(world, "a", **options)
    topology = hpczero.Topology.create(world.comm, mesh=hpczero.Mesh(tensor=2))
    model, weights = hpczero.hf.load(world.folder / "a", topology=topology)
    split(model, topology, llama_rule(model.config))
    hpczero.zeroify(model, None, topology=topology, initialize=weights)
    ids = llama.tokens()
    with torch.no_grad():
        found = model(input_ids=ids).logits
    hpczero.hf.save_pretrained(model, world.folder / "b")
    hpczero.release(model)
    topology.free()

    def judge() -> None:
        plain = llama.made(**options)
        assert float((plain(input_ids=ids).logits - found).detach().abs().max()) < 1e-6
        again = llama.library().AutoModelForCausalLM.from_pretrained(world.folder / "b")
        assert same(plain.parameters(), again.parameters())

    world.on_root(judge)
