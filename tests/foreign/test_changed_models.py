"""A model that is changed between ``hf.load`` and ``zeroify``: values go with the parameters, as in plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import hpczero
from hpczero import finetune
from hpczero.errors import PlanError
from hpczero.parallel import close, llama_rule, split
from tests.foreign.llama import VOCABULARY, holds, library, made, on_disk
from tests.helpers.world import World
from tests.parallel.wholes import tensor_ranks

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]


def loaded(world: World, **options: Any) -> tuple[Any, Any]:
    """A model that lies in the ranks' folder, and its weights. Collective."""
    return hpczero.hf.load(on_disk(world, **options), topology=world.topology)


class Wrapped(nn.Module):
    """Around a model, whose names it lengthens."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def swapped(model: Any) -> Any:
    """The two layers in the other order."""
    model.model.layers = nn.ModuleList(reversed(model.model.layers))
    return model


def pruned(model: Any) -> Any:
    """The first layer is gone, so the second has its name."""
    model.model.layers = model.model.layers[1:]
    return model


def tied(model: Any) -> Any:
    """The head is the embedding."""
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def deepened(model: Any) -> Any:
    """A copy of the first layer comes behind the last one."""
    model.model.layers.append(copy.deepcopy(model.model.layers[0]))
    return model


def swapped_twins(model: Any) -> Any:
    """Both layers are copies of the other one."""
    layers = [copy.deepcopy(each) for each in reversed(model.model.layers)]
    model.model.layers = nn.ModuleList(layers)
    return model


CHANGES: dict[str, Callable[[Any], Any]] = {
    "layers in another order": swapped,
    "a layer left out": pruned,
    "a head that is tied by hand": tied,
    "a module around the model": Wrapped,
    "a copy": copy.deepcopy,
    "a copy in another order": lambda model: swapped(copy.deepcopy(model)),
    "a copy in another order, copied": lambda model: copy.deepcopy(swapped(model)),
    "a copy without a layer": lambda model: pruned(copy.deepcopy(model)),
    "a layer that is copied": deepened,
    "layers that are copies of each other": swapped_twins,
    "nothing": lambda model: model,
}


@pytest.mark.parametrize("name", CHANGES)
def test_values_follow_the_parameters(world: World, name: str) -> None:
    model, weights = loaded(world)
    model = CHANGES[name](model)
    hpczero.zeroify(model, None, topology=world.topology, initialize=weights)
    load = library().LlamaForCausalLM.from_pretrained
    holds(world, model, lambda: CHANGES[name](load(world.folder, dtype=torch.float32)))
    hpczero.release(model)


def new_head(model: Any) -> None:
    """Of the same name and shape, with values of its own."""
    model.lm_head = nn.Linear(18, VOCABULARY, bias=False)


def untied(model: Any) -> None:
    """An output matrix that no file has under its name."""
    model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))


def more_modules(model: Any) -> None:
    """One that the files know nothing of."""
    model.score = nn.Linear(18, 3)


def longer(model: Any) -> None:
    """Two more tokens, as a tokenizer's new special tokens ask for."""
    model.resize_token_embeddings(VOCABULARY + 2, mean_resizing=False)


def shorter(model: Any) -> None:
    """Fewer tokens."""
    model.resize_token_embeddings(VOCABULARY - 3)


def added_to_a_copy(model: Any) -> Any:
    """Without values, under the name of what was there."""
    found = copy.deepcopy(model)
    with torch.device("meta"):
        found.lm_head = nn.Linear(18, VOCABULARY, bias=False)
    return found


def tied_in_a_copy(model: Any) -> Any:
    """One parameter, of two modules that had one each."""
    found = copy.deepcopy(model)
    found.model.layers[0].input_layernorm.weight = found.model.layers[1].input_layernorm.weight
    return found


WITHOUT_VALUES = (new_head, untied, more_modules, longer, shorter, added_to_a_copy, tied_in_a_copy)


@pytest.mark.parametrize("change", WITHOUT_VALUES)
@pytest.mark.parametrize("ties", [False, True])
def test_parameters_without_values_in_the_files_are_named_on_all_ranks(
    world: World, change: Any, ties: bool
) -> None:
    """Read by their names they would get what lies there in the files: other values, or those of a neighbour."""
    model, weights = loaded(world, tie_word_embeddings=ties)
    zeroify = partial(hpczero.zeroify, topology=world.topology, initialize=weights)
    world.raises(PlanError, "hpczero.hf.load", zeroify, change(model) or model, None)


@pytest.mark.ranks(2)
def test_cut_layers_of_a_model_with_other_names_are_refused_on_all_ranks(world: World) -> None:
    """Cutting makes new parameters, of which only the names are known: those of the layer that was there."""
    on_disk(world, num_key_value_heads=3)
    with tensor_ranks(world.comm) as topology:
        model, weights = hpczero.hf.load(world.folder, topology=topology)
        split(swapped(model), topology, llama_rule(model.config))
        zeroify = partial(hpczero.zeroify, model, None, topology=topology, initialize=weights)
        world.raises(PlanError, "is held in parts", zeroify)
        close(model)


def test_weights_by_name_refuse_another_shape(world: World) -> None:
    """As an ``initialize`` of one's own calls them; it may ask for the old shape and fill the rest."""
    model, weights = loaded(world)
    with pytest.raises(PlanError, match=r"is \(45, 18\), and was \(43, 18\)"):
        weights("lm_head.weight", torch.empty(VOCABULARY + 2, 18))
    longer(model)

    def fill(name: str, tensor: torch.Tensor) -> None:
        if tensor.shape[0] != VOCABULARY + 2:
            weights(name, tensor)
            return
        old = torch.empty(VOCABULARY, 18)
        weights(name, old)
        tensor[:VOCABULARY], tensor[VOCABULARY:] = old, 0.5

    hpczero.zeroify(model, None, topology=world.topology, initialize=fill)
    found = world.comm.bcast(hpczero.full_state_dict(model))
    hpczero.release(model)
    expected = made()
    head = torch.equal(found["lm_head.weight"][:VOCABULARY], expected.lm_head.weight)
    world.check(head and bool((found["lm_head.weight"][VOCABULARY:] == 0.5).all()))


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_low_rank_products_on_loaded_weights_read_every_byte_once(
    world: World, quantize: str | None
) -> None:
    """``first_values`` leaves the reading by ranges to the weights; the products are those of a plain build."""
    model, weights = loaded(world)
    finetune.lora(model, rank=2, seed=5)
    optimizer = torch.optim.AdamW(finetune.trained(model))
    with pytest.raises(PlanError, match=r"initialize=hpczero\.finetune\.first_values\(weights\)"):
        hpczero.zeroify(model, optimizer, topology=world.topology, initialize=weights)
    first = finetune.first_values(weights, seed=5)
    hpczero.zeroify(model, optimizer, topology=world.topology, initialize=first, quantize=quantize)
    found = world.comm.bcast(hpczero.full_state_dict(model))
    hpczero.release(model)
    plain = finetune.lora(made(), rank=2, seed=5)
    expected = plain.state_dict()
    loose = 0.0 if quantize is None else 2e-3
    wrong = [k for k in expected if (found[k] - expected[k]).abs().max() > loose]
    world.check(found.keys() == expected.keys() and not wrong, str(wrong))
    base = sum(4 * p.numel() for n, p in plain.named_parameters() if ".lora." not in n)
    read = world.comm.allreduce(weights.nbytes_read)
    world.check(read == base, f"{read} of {base} bytes")
