"""What a fine-tuned model leaves is loaded by transformers and peft, with the outputs of one process of plain torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import hpczero
from hpczero import finetune
from hpczero.errors import CheckpointMismatch, ConfigError
from tests.compat.architectures import ARCHITECTURES, VOCABULARY
from tests.finetune.models import adapted_gpt, optimizer_of, rounded
from tests.helpers.parallel import on_root, parallel_assert
from tests.helpers.small_models import raises_on_all, sgd, zeroified

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


def train(model: Any, optimizer: Any, *ranks: int) -> None:
    """On the mean of the losses of ``ranks``."""
    for step in range(3):
        for rank in ranks:
            ids = tokens(rank, step)
            (model(input_ids=ids, labels=ids).loss / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()


def trained_in_one_process(model: Any, size: int) -> Any:
    train(model, optimizer_of(model), *range(size))
    return model


def off(found: Any, expected: Any) -> float:
    """The largest difference of logits."""
    ids = tokens(0, 99)
    with torch.no_grad():
        logits = [model(input_ids=ids).logits for model in (found, expected)]
    return (logits[0] - logits[1]).abs().max().item()


def loaded(folder: Path, kind: str, what: str) -> Any:
    """What others make of the files: peft of an adapter, transformers of merged weights, which lack nothing."""
    import peft
    import transformers

    if what == "adapter":
        return peft.PeftModel.from_pretrained(base(kind), folder / what)
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    found, said = load(folder / what, output_loading_info=True)
    assert not any(said.values()), said
    return found


def check(folder: Path, kind: str, plain: Any, *whats: str) -> None:
    """Files have the logits of a model that one process has trained, which are not those of the base."""
    apart = {what: off(loaded(folder, kind, what), plain) for what in whats}
    assert max(apart.values()) <= 1e-6, f"{apart}"
    assert off(base(kind), plain) > 1e-3, "nothing was trained"


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

    def judge() -> None:
        plain = trained_in_one_process(adapted(kind), comm.size)
        check(folder, kind, plain, "merged", "adapter")
        expected = 4 * sum(p.numel() for p in finetune.trained(plain))
        nbytes = (folder / "adapter" / "adapter_model.safetensors").stat().st_size
        assert expected <= nbytes <= expected + 8192

    on_root(comm, judge)


@pytest.mark.parametrize("adapted", [ours, pefts], ids=["ours", "peft"])
def test_a_base_of_codes_is_merged_as_it_was_trained(
    comm: MPI.Intracomm, topology: Topology, folder: Path, adapted: Any
) -> None:
    model = adapted("llama")
    optimizer = optimizer_of(model)
    with zeroified(model, optimizer, topology=topology, quantize="nf4"):
        train(model, optimizer, comm.rank)
        finetune.save_merged(model, folder / "merged")

    def judge() -> None:
        place = "model.layers." if adapted is ours else "base_model.model.model.layers."
        plain = trained_in_one_process(rounded(adapted("llama"), "nf4", place), comm.size)
        check(folder, "llama", plain, "merged")

    on_root(comm, judge)


def test_a_layer_that_trains_whole_goes_with_the_adapter(
    comm: MPI.Intracomm, topology: Topology, folder: Path
) -> None:
    def build() -> Any:
        model = finetune.lora(base("bert-classifier"), rank=2, targets=["query", "value"])
        model.classifier.requires_grad_(True)
        return model

    model = build()
    optimizer = optimizer_of(model)
    with zeroified(model, optimizer, topology=topology):
        ids = tokens(comm.rank, 0)
        model(input_ids=ids, labels=ids[:, 0] % 2).loss.backward()
        optimizer.step()
        finetune.save_adapter(model, folder / "adapter")
        state = hpczero.full_state_dict(model)

    def judge() -> None:
        plain = build()
        plain.load_state_dict(state)
        assert off(loaded(folder, "bert-classifier", "adapter"), plain) <= 1e-6

    on_root(comm, judge)


def with_whole_modules(**options: Any) -> Any:
    """peft's products, and what ``options`` of its configuration train beside them."""
    import peft

    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, **options)
        return peft.get_peft_model(base("llama"), config).eval()


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


ADAPTED: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    **{kind: (partial(of_peft, kind), ("adapter",)) for kind in KINDS},
    # As peft itself adds for a classifier; peft asks such a module for its state dict.
    **{
        " and ".join(names): (
            partial(with_whole_modules, modules_to_save=names),
            ("adapter", "merged"),
        )
        for names in (["lm_head"], ["embed_tokens", "lm_head"])
    },
}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", ADAPTED)
def test_any_adapter_of_peft_is_saved_as_peft_loads_it(
    comm: MPI.Intracomm, topology: Topology, folder: Path, stage: int, kind: str
) -> None:
    make, whats = ADAPTED[kind]
    model = make()
    optimizer = optimizer_of(model)
    with zeroified(model, optimizer, topology=topology, stage=stage):
        train(model, optimizer, comm.rank)
        finetune.save_adapter(model, folder / "adapter")
        if "merged" in whats:
            finetune.save_merged(model, folder / "merged")

    def judge() -> None:
        check(folder, "llama", trained_in_one_process(make(), comm.size), *whats)

    on_root(comm, judge)


def with_tied_head() -> Any:
    import peft

    plain = base("llama")
    plain.lm_head.weight = plain.model.embed_tokens.weight
    options: Any = {"target_modules": ["lm_head", "q_proj"], "init_lora_weights": False}
    return peft.get_peft_model(plain, peft.LoraConfig(r=2, **options))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        # Trained rows of the embedding are no product; without them the folder would load, with other outputs.
        (partial(with_whole_modules, trainable_token_indices=[1, 2]), "merge with peft"),
        # The file has such a weight once: without the product the head is wrong, with it the embedding.
        (with_tied_head, "is that of .*embed_tokens"),
    ],
    ids=["rows", "a tied head"],
)
def test_what_merged_weights_would_leave_out_is_refused(
    comm: MPI.Intracomm, topology: Topology, folder: Path, make: Callable[[], Any], said: str
) -> None:
    model = make()
    with zeroified(model, optimizer_of(model), topology=topology):
        raises_on_all(comm, ConfigError, said, finetune.save_merged, model, folder / "merged")
        parallel_assert(comm, not (folder / "merged").exists())


def test_dtype_names_and_kinds_that_cannot_be_are_refused_on_every_rank(
    comm: MPI.Intracomm, topology: Topology, folder: Path
) -> None:
    model = adapted_gpt()
    model.get_parameter("blocks.0.mlp_norm.bias").requires_grad_(True)
    model.get_parameter("blocks.0.mlp_norm.weight").data[1] = 7e4
    with zeroified(model, optimizer_of(model), topology=topology):
        save = partial(finetune.save_merged, model, folder / "merged")
        raises_on_all(comm, ConfigError, "dtype: got 'int8'", save, dtype="int8")
        said, alone = "'blocks.0.mlp_norm' trains in part", finetune.save_adapter
        raises_on_all(comm, ConfigError, said, alone, model, folder / "adapter")
        large = r"'?blocks.0.mlp_norm.weight'? holds 70000, which torch.float16 cannot; take a dtype of a wider range"
        raises_on_all(comm, CheckpointMismatch, large, save, dtype="fp16")
        save(dtype="bf16")
        parallel_assert(comm, sorted(p.name for p in folder.iterdir()) == ["merged"])
    plain = nn.Linear(3, 3)
    with zeroified(plain, sgd(plain), topology=topology):
        said, merge = "has no low-rank products", finetune.save_merged
        raises_on_all(comm, ConfigError, said, merge, plain, folder / "none")
    with safe_open(folder / "merged" / "model.safetensors", "pt") as file:
        kinds = {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
        assert kinds == {"BF16"}
        assert not [name for name in file.keys() if "lora" in name]  # noqa: SIM118
