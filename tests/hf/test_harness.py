"""Models in shards under lm-evaluation-harness, beside plain torch and beside the harness's own model."""

from __future__ import annotations

import json
import warnings
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import hpczero
from hpczero.data.tokenize import ByteTokenizer, as_library
from hpczero.errors import ConfigError
from hpczero.hf.harness import GrowingText, SharedScorer, check_tasks, evaluate, harness_model
from tests.helpers.parallel import on_root, parallel_assert
from tests.helpers.small_models import raises_on_all, tiny_gpt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpi4py import MPI

    from hpczero import Topology

CONTEXT = 24
PAIRS = [
    ("the rank ", "owns its shard"),
    ("", " of a text that begins"),
    ("a context that is longer than the model can see at once, so it is cut ", "here"),
    ("x", "y"),
    ("trailing spaces   ", "z"),
]
TEXTS = ["", "short", "a text that is longer than the model can see at once, in windows"]
PROMPTS = ["the rank owns", "x", "a prompt that is much longer than the context of the model"]
TASKS = {
    "choice": """
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: ["one", "two of them"]
doc_to_target: gold
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "pages": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}]
""",
}


def requests(*arguments: Any) -> list[Any]:
    return [SimpleNamespace(args=each) for each in arguments]


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 3)
def test_scores_are_those_of_plain_torch_row_by_row(
    comm: MPI.Intracomm, topology: Topology
) -> None:
    draw = torch.Generator().manual_seed(0)
    rows: list[tuple[list[int], list[int]]] = []
    for length, number in ((9, 3), (1, 1), (4, 4), (7, 0), (2, 1), (11, 5), (5, 2)):
        ids: list[int] = torch.randint(50, (length + number,), generator=draw).tolist()
        rows.append((ids[:length], ids[length:]))
    plain, expected = tiny_gpt().eval(), []
    for seen, targets in rows:
        with torch.no_grad():
            last = plain(torch.tensor([seen]))[0, -max(len(targets), 1) :].log_softmax(-1)
        best = last.argmax(-1).tolist()
        total = sum(last[at, target].item() for at, target in enumerate(targets))
        expected.append((pytest.approx(total, abs=1e-5), best == targets, best[-1]))
    model = tiny_gpt().eval()
    hpczero.zeroify(model, None, stage=3, topology=topology)
    scorer = SharedScorer(model, context=11, micro_batch=2)
    found: Any = expected
    if topology.is_root:
        found = scorer.ask(rows)
        topology.broadcast_text("{}")
    else:
        scorer.follow()
    parallel_assert(comm, found == expected, str(found))
    hpczero.release(model)


def test_a_text_ends_at_a_stop_at_the_separator_or_when_it_is_long_enough() -> None:
    def grown(new: str, **options: Any) -> tuple[str, bool]:
        text = GrowingText(20, ByteTokenizer(), "begin", {"max_gen_toks": 8, **options})
        for token in new.encode():
            text.add(token)
        return text.text, text.is_done

    assert grown("ab") == ("ab", False)
    assert grown("abc|", until=["|", "zz"]) == ("abc", True)
    assert grown("abcdefgh") == ("abcdefgh", True)
    text = GrowingText(20, ByteTokenizer(), "a prompt of many bytes", {"max_gen_toks": 8})
    assert bytes(text.ids) == b"f many bytes"
    text.add(ByteTokenizer.separator)
    assert (text.text, text.is_done) == ("", True)
    with pytest.raises(ConfigError, match="drawn"):
        grown("", temperature=0.7)
    with pytest.raises(ConfigError, match="up to 20 new tokens, and the model sees 20"):
        grown("", max_gen_toks=20)


@contextmanager
def loaded(topology: Topology, name: str, folder: Path) -> Iterator[Any]:
    model, weights = hpczero.hf.load(folder / name, topology=topology)
    hpczero.zeroify(model, None, stage=3, topology=topology, initialize=weights)
    yield model
    hpczero.release(model)


def write(folder: Path) -> None:
    library = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 257, "initializer_range": 0.3, "eos_token_id": 256, "bos_token_id": 256}
    ours, separator = as_library(ByteTokenizer()) or (None, None)
    tokenizer = library.PreTrainedTokenizerFast(
        tokenizer_object=ours, eos_token="<|endoftext|>", eos_token_id=separator
    )
    gpt = library.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=CONTEXT, **sizes)
    llama = library.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        **sizes,
    )
    for name, model in (
        ("gpt2", library.GPT2LMHeadModel(gpt)),
        ("llama", library.LlamaForCausalLM(llama)),
    ):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def harness() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("lm_eval.models.huggingface")


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_every_request_has_the_answer_of_the_harness_s_own_model(
    comm: MPI.Intracomm, topology: Topology, folder: Path, name: str
) -> None:
    module = harness()
    on_root(comm, lambda: write(folder))
    asked: dict[str, Any] = {
        "loglikelihood": requests(*PAIRS),
        "loglikelihood_rolling": requests(*((text,) for text in TEXTS[1:])),
        "generate_until": requests(
            *((prompt, {"until": ["\n"], "max_gen_toks": 7}) for prompt in PROMPTS)
        ),
    }
    with loaded(topology, name, folder) as model:
        scorer = SharedScorer(model, context=CONTEXT, micro_batch=2)
        if not topology.is_root:
            scorer.follow()
            return
        ours = harness_model(scorer, ByteTokenizer())
        try:
            found = {kind: getattr(ours, kind)(each) for kind, each in asked.items()}
        finally:
            topology.broadcast_text("{}")
    theirs = module.HFLM(
        pretrained=str(folder / name),
        device="cpu",
        dtype="float32",
        batch_size=3,
        max_length=CONTEXT,
    )
    expected = {kind: getattr(theirs, kind)(each) for kind, each in asked.items()}
    for (total, greedy), (their_total, their_greedy) in zip(
        found["loglikelihood"], expected["loglikelihood"], strict=True
    ):
        assert total == pytest.approx(their_total, abs=1e-4)
        assert greedy == their_greedy
    assert found["loglikelihood_rolling"] == pytest.approx(
        expected["loglikelihood_rolling"], abs=1e-4
    )
    assert found["generate_until"] == expected["generate_until"]


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.ranks(1, 3)
@pytest.mark.filterwarnings("ignore")
def test_tasks_of_a_folder_give_the_same_metrics_as_the_harness_and_a_wrong_one_ends_all_ranks(
    comm: MPI.Intracomm, topology: Topology, folder: Path
) -> None:
    module = harness()
    rows = [{"text": f"line {n} of the text", "gold": n % 2} for n in range(7)]

    def make() -> None:
        write(folder)
        (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        for name, text in TASKS.items():
            place = f"{{data_files: {{test: {folder}/rows.jsonl}}, cache_dir: {folder}/cache}}"
            head = f"task: {name}\ndataset_path: json\ntest_split: test\ndataset_kwargs: {place}\n"
            (folder / f"{name}.yaml").write_text(head + text)

    on_root(comm, make)
    with loaded(topology, "llama", folder) as model:
        named: dict[str, Any] = {"context": CONTEXT, "folder": folder}
        found = evaluate(model, ByteTokenizer(), [*TASKS], micro_batch=2, **named)
        raises_on_all(
            comm, ConfigError, "absent", evaluate, model, ByteTokenizer(), ["absent"], **named
        )
        assert not model.training
    if topology.is_root:
        with pytest.raises(ConfigError, match=r"no task is called absent .*choice, pages"):
            check_tasks(ByteTokenizer(), ["choice", "absent"], folder)
        lm_eval = pytest.importorskip("lm_eval")
        manager = pytest.importorskip("lm_eval.tasks").TaskManager(
            include_path=str(folder), include_defaults=False
        )
        theirs = module.HFLM(pretrained=str(folder / "llama"), device="cpu", dtype="float32")
        results = lm_eval.simple_evaluate(
            theirs, tasks=[*TASKS], task_manager=manager, bootstrap_iters=0
        )["results"]
        assert found == {
            "choice/acc": pytest.approx(results["choice"]["acc,none"]),
            "pages/bits_per_byte": pytest.approx(results["pages"]["bits_per_byte,none"], abs=1e-4),
        }
