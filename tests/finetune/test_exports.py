"""What a fine-tuned model leaves is loaded by transformers and peft, with the outputs of one process of plain torch."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import hpczero
from hpczero import finetune
from hpczero.errors import CheckpointMismatch, ConfigError
from tests.compat.architectures import ARCHITECTURES, VOCABULARY
from tests.finetune.models import adapted_gpt, optimizer_of, rounded
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import raises_on_all, zeroified

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.ranks(2),
    pytest.mark.limit(300),
    # Others' code warns of itself; a warning of hpczero's is an error as everywhere.
    pytest.mark.filterwarnings("ignore", "error:::hpczero"),
]

BUILD = {each.name: each.build for each in ARCHITECTURES}
NAMES = {"llama": ["q_proj", "v_proj", "down_proj"], "gpt2": ["c_attn"]}


def base(kind: str) -> Any:
    return BUILD[kind]().eval()


def tokens(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, VOCABULARY, (2, 7), generator=generator)


def ours(kind: str) -> Any:
    return finetune.lora(base(kind), rank=2, alpha=5)


def pefts(kind: str) -> Any:
    import peft

    config = peft.LoraConfig(r=2, lora_alpha=5, target_modules=NAMES[kind], init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return peft.get_peft_model(base(kind), config).eval()


def train(model: Any, optimizer: Any, rank: int) -> None:
    """What ``trained_in_one_process`` does, on one of the ranks."""
    for step in range(3):
        ids = tokens(rank, step)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def trained_in_one_process(model: Any, size: int) -> Any:
    optimizer = optimizer_of(model)
    for step in range(3):
        for rank in range(size):
            ids = tokens(rank, step)
            (model(input_ids=ids, labels=ids).loss / size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def off(found: Any, expected: Any) -> float:
    """The largest difference of logits."""
    ids = tokens(0, 99)
    with torch.no_grad():
        logits = [model(input_ids=ids).logits for model in (found, expected)]
    return (logits[0] - logits[1]).abs().max().item()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("adapted", [ours, pefts], ids=["ours", "peft"])
def test_merged_weights_and_adapters_load_elsewhere(
    comm: MPI.Intracomm, topology: Topology, folder: Path, kind: str, adapted: Any
) -> None:
    model = adapted(kind)
    optimizer = optimizer_of(model)
    with zeroified(model, optimizer, topology=topology):
        train(model, optimizer, comm.rank)
        finetune.save_adapter(model, folder / "adapter")
        finetune.save_merged(model, folder / "merged")
        again = partial(finetune.save_merged, model, folder / "merged")
        raises_on_all(comm, ConfigError, "is there already", again)
    wrong = ""
    if comm.rank == 0:
        wrong = what_is_wrong(trained_in_one_process(adapted(kind), comm.size), kind, folder)
    parallel_assert(comm, not wrong, wrong)


@pytest.mark.parametrize("adapted", [ours, pefts], ids=["ours", "peft"])
def test_a_base_of_codes_is_merged_as_it_was_trained(
    comm: MPI.Intracomm, topology: Topology, folder: Path, adapted: Any
) -> None:
    model = adapted("llama")
    optimizer = optimizer_of(model)
    with zeroified(model, optimizer, topology=topology, quantize="nf4"):
        train(model, optimizer, comm.rank)
        finetune.save_merged(model, folder / "merged")
    wrong = ""
    if comm.rank == 0:
        import transformers

        place = "model.layers." if adapted is ours else "base_model.model.model.layers."
        plain = trained_in_one_process(rounded(adapted("llama"), "nf4", place), comm.size)
        load: Any = transformers.AutoModelForCausalLM.from_pretrained
        merged, said = load(folder / "merged", output_loading_info=True)
        apart, changed = off(merged, plain), off(merged, base("llama"))
        odd = {key: value for key, value in said.items() if value}
        wrong = "" if apart <= 1e-6 and changed > 1e-3 and not odd else f"{apart}, {changed}, {odd}"
    parallel_assert(comm, not wrong, wrong)


def what_is_wrong(plain: Any, kind: str, folder: Path) -> str:
    import peft
    import transformers

    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    merged, said = load(folder / "merged", output_loading_info=True)
    with_adapter = peft.PeftModel.from_pretrained(base(kind), folder / "adapter")
    apart = {
        "merged": off(merged, plain),
        "adapter": off(with_adapter, plain),
        "untrained": off(base(kind), plain),
    }
    elements = sum(p.numel() for p in finetune.trained(plain))
    nbytes = (folder / "adapter" / "adapter_model.safetensors").stat().st_size
    odd = {key: value for key, value in said.items() if value}
    fine = apart["merged"] <= 1e-6 and apart["adapter"] <= 1e-6 and apart["untrained"] > 1e-3
    fine = fine and not odd and 4 * elements <= nbytes <= 4 * elements + 8192
    return "" if fine else f"{apart}, {odd}, {nbytes} bytes for {elements} elements"


def test_a_layer_that_trains_whole_goes_with_the_adapter(
    comm: MPI.Intracomm, topology: Topology, folder: Path
) -> None:
    def build() -> Any:
        model = finetune.lora(BUILD["bert-classifier"]().eval(), rank=2, targets=["query", "value"])
        model.classifier.requires_grad_(True)
        return model

    model = build()
    with zeroified(model, optimizer_of(model), topology=topology):
        ids = tokens(comm.rank, 0)
        model(input_ids=ids, labels=ids[:, 0] % 2).loss.backward()
        hpczero.sharding(model).optimizer.step()  # type: ignore[union-attr]
        finetune.save_adapter(model, folder / "adapter")
        state = hpczero.full_state_dict(model)
    wrong = ""
    if comm.rank == 0:
        import peft

        model = build()
        model.load_state_dict(state)
        found = peft.PeftModel.from_pretrained(
            BUILD["bert-classifier"]().eval(), folder / "adapter"
        )
        apart = off(found, model)
        wrong = "" if apart <= 1e-6 else f"off by {apart}"
    parallel_assert(comm, not wrong, wrong)


def with_whole_modules(**options: Any) -> Any:
    """peft's products, and what ``options`` of its configuration train beside them."""
    import peft

    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, **options)
        return peft.get_peft_model(base("llama"), config).eval()


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("names", [["lm_head"], ["embed_tokens", "lm_head"]])
def test_modules_that_peft_trains_whole_are_in_both_kinds_of_files(
    comm: MPI.Intracomm, topology: Topology, folder: Path, stage: int, names: list[str]
) -> None:
    """``modules_to_save``, as peft itself adds for a classifier; peft asks such a module for its state dict."""
    model = with_whole_modules(modules_to_save=names)
    optimizer = optimizer_of(model)
    with zeroified(model, optimizer, topology=topology, stage=stage):
        train(model, optimizer, comm.rank)
        finetune.save_adapter(model, folder / "adapter")
        finetune.save_merged(model, folder / "merged")
    wrong = ""
    if comm.rank == 0:
        import peft
        import transformers

        plain = trained_in_one_process(with_whole_modules(modules_to_save=names), comm.size)
        load: Any = transformers.AutoModelForCausalLM.from_pretrained
        again = [
            load(folder / "merged"),
            peft.PeftModel.from_pretrained(base("llama"), folder / "adapter"),
        ]
        apart = [off(found, plain) for found in again]
        wrong = "" if max(apart) <= 1e-6 else f"off by {apart}"
    parallel_assert(comm, not wrong, wrong)


KINDS: dict[str, dict[str, Any]] = {
    "VeraConfig": {"r": 4, "target_modules": ["q_proj", "o_proj"]},  # shares frozen buffers
    "IA3Config": {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "LNTuningConfig": {},
    "HRAConfig": {"r": 2, "target_modules": ["q_proj"]},
    "FourierFTConfig": {"n_frequency": 8, "target_modules": ["v_proj"]},
    "LoraConfig": {"r": 2, "target_modules": ["v_proj"], "bias": "all"},
}


def of_peft(kind: str) -> Any:
    import peft

    torch.manual_seed(3)
    return peft.get_peft_model(base("llama"), getattr(peft, kind)(**KINDS[kind])).eval()


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_any_adapter_of_peft_is_saved_as_peft_loads_it(
    comm: MPI.Intracomm, topology: Topology, folder: Path, stage: int, kind: str
) -> None:
    model = of_peft(kind)
    optimizer = optimizer_of(model)
    with zeroified(model, optimizer, topology=topology, stage=stage):
        train(model, optimizer, comm.rank)
        finetune.save_adapter(model, folder / "adapter")
    wrong = ""
    if comm.rank == 0:
        import peft

        plain = trained_in_one_process(of_peft(kind), comm.size)
        apart = off(peft.PeftModel.from_pretrained(base("llama"), folder / "adapter"), plain)
        wrong = "" if apart <= 1e-6 else f"off by {apart}"
    parallel_assert(comm, not wrong, wrong)


def test_what_peft_trains_beside_products_is_not_left_out_of_merged_weights(
    comm: MPI.Intracomm, topology: Topology, folder: Path
) -> None:
    """Trained rows of the embedding are no product; without them the folder would load, with other outputs."""
    model = with_whole_modules(trainable_token_indices=[1, 2])
    with zeroified(model, optimizer_of(model), topology=topology):
        merge = partial(finetune.save_merged, model, folder / "merged")
        raises_on_all(comm, ConfigError, "merge with peft", merge)
        parallel_assert(comm, not (folder / "merged").exists())


def test_a_product_beside_a_tied_weight_is_not_merged_by_half(
    comm: MPI.Intracomm, topology: Topology, folder: Path
) -> None:
    """The file has such a weight once: without the product the head is wrong, with it the embedding."""
    import peft

    plain = base("llama")
    plain.lm_head.weight = plain.model.embed_tokens.weight
    config = peft.LoraConfig(r=2, target_modules=["lm_head", "q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(plain, config)
    with zeroified(model, optimizer_of(model), topology=topology):
        merge = partial(finetune.save_merged, model, folder / "merged")
        raises_on_all(comm, ConfigError, "is that of .*embed_tokens", merge)
        parallel_assert(comm, not (folder / "merged").exists())


def test_dtype_names_and_kinds_that_cannot_be_are_refused_on_every_rank(
    comm: MPI.Intracomm, topology: Topology, folder: Path
) -> None:
    model = adapted_gpt()
    model.get_parameter("blocks.0.mlp_norm.bias").requires_grad_(True)
    model.get_parameter("blocks.0.mlp_norm.weight").data[1] = 7e4
    with zeroified(model, optimizer_of(model), topology=topology):
        save = partial(finetune.save_merged, model, folder / "merged")
        raises_on_all(comm, ConfigError, "dtype: got 'int8'", partial(save, dtype="int8"))
        alone = partial(finetune.save_adapter, model, folder / "adapter")
        raises_on_all(comm, ConfigError, "'blocks.0.mlp_norm' trains in part", alone)
        large = r"'?blocks.0.mlp_norm.weight'? holds 70000, which torch.float16 cannot; take a dtype of a wider range"
        raises_on_all(comm, CheckpointMismatch, large, partial(save, dtype="fp16"))
        save(dtype="bf16")
        parallel_assert(comm, sorted(p.name for p in folder.iterdir()) == ["merged"])
    plain = nn.Linear(3, 3)
    with zeroified(plain, torch.optim.SGD(plain.parameters(), lr=0.1), topology=topology):
        none = partial(finetune.save_merged, plain, folder / "none")
        raises_on_all(comm, ConfigError, "has no low-rank products", none)
    wrong = ""
    if comm.rank == 0:
        head = (folder / "merged" / "model.safetensors").read_bytes()
        text = json.loads(head[8 : 8 + int.from_bytes(head[:8], "little")])
        kinds = {entry["dtype"] for name, entry in text.items() if name != "__metadata__"}
        products = [name for name in text if "lora" in name]
        wrong = "" if kinds == {"BF16"} and not products else f"{kinds}, {products}"
    parallel_assert(comm, not wrong, wrong)
