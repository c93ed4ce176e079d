"""Export: what other programs read is what was in the checkpoint, and a bad one is never exported."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import save_file

import hpczero
from hpczero.checkpoint.__main__ import Verdict, verify
from hpczero.checkpoint.disk.folder import read_manifest
from hpczero.checkpoint.disk.format import step_folder
from hpczero.checkpoint.foreign.exporting import Exported, WeightsForm, cast, export
from hpczero.checkpoint.foreign.safe_file import SafeFile
from hpczero.data import BPETokenizer, ByteTokenizer
from hpczero.data.tokenize import LibraryTokenizer
from hpczero.errors import ConfigError, CorruptCheckpoint
from hpczero.job.team import Ranks
from tests.checkpoint.damage import datasets, flip_in
from tests.checkpoint.foreign import checkpoint, gpt_checkpoint, once, read_all, state
from tests.checkpoint.programs import command, program_of
from tests.helpers.small_models import same_state, tiny_gpt, tiny_tokens
from tests.helpers.world import World

MIB = 2**20


# --- one process -----------------------------------------------------------------------------------------------------


def test_safetensors_hold_each_tensor_once(tmp_path: Path) -> None:
    expected = state()
    path = checkpoint(tmp_path / "run", expected)
    found = export(path, tmp_path / "out", WeightsForm(shard_mib=1))
    del expected["again.weight"]
    assert same_state(read_all(tmp_path / "out"), expected)
    nbytes = sum(tensor.nbytes for tensor in expected.values())
    assert found == Exported(path, 3, len(expected), nbytes)
    names = sorted(entry.name for entry in (tmp_path / "out").iterdir())
    assert names == [
        *(f"model-0000{n}-of-00004.safetensors" for n in (1, 2, 3, 4)),
        "model.safetensors.index.json",
    ]
    index = json.loads((tmp_path / "out" / names[-1]).read_text())
    assert index["metadata"]["total_size"] == nbytes


def test_torch_file_holds_every_name(tmp_path: Path) -> None:
    expected = state()
    checkpoint(tmp_path / "run", expected)
    export(tmp_path / "run", tmp_path / "out.pt", WeightsForm(format="torch"))
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert same_state(found, expected)
    assert found["again.weight"].data_ptr() == found["first.weight"].data_ptr()
    nbytes = sum(tensor.nbytes for tensor in expected.values())
    assert (tmp_path / "out.pt").stat().st_size < nbytes + MIB / 16


@pytest.mark.parametrize("name", ["safetensors", "torch"])
@pytest.mark.parametrize(("dtype", "kind"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_parameters_are_cast_and_buffers_are_not(
    tmp_path: Path, name: Any, dtype: Any, kind: Any
) -> None:
    expected = state()
    buffers = ("calls", "mask", "mean")
    checkpoint(tmp_path / "run", expected)
    export(tmp_path / "run", tmp_path / "out", WeightsForm(format=name, dtype=dtype))
    cast = {key: value if key in buffers else value.to(kind) for key, value in expected.items()}
    if name == "torch":
        assert same_state(torch.load(tmp_path / "out", weights_only=True), cast)
    else:
        del cast["again.weight"]
        assert same_state(read_all(tmp_path / "out"), cast)


@pytest.mark.parametrize(("dtype", "kind"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_rounding_is_that_of_torch(dtype: str, kind: torch.dtype) -> None:
    """Any bits: subnormals, ties, both zeros; then what is not finite."""
    bits = np.random.default_rng(1).integers(0, 2**32, 200_000, dtype=np.uint32)
    bits[:8] = [0, 1 << 31, 0x3F808000, 0x3F818000, 0x3F808001, 1, 0x80000001, 0x33000000]
    values = bits.view(np.float32)
    highest = 65519.9 if dtype == "fp16" else 3.39e38
    values = values[np.abs(values) < highest]
    special = np.array([np.inf, -np.inf, np.nan, -np.nan], dtype=np.float32)
    for part in (values, special):
        found = torch.from_numpy(cast(part, dtype, "x").view(np.int16).copy()).view(kind)
        expected = torch.from_numpy(part).to(kind)
        nan = expected.isnan()
        assert torch.equal(found.isnan(), nan)
        assert torch.equal(found[~nan].view(torch.int16), expected[~nan].view(torch.int16))


@pytest.mark.parametrize(
    ("dtype", "value", "advice"),
    [("fp16", 65520.0, "fp32 or bf16"), ("fp16", -1e30, "fp32 or bf16"), ("bf16", 3.4e38, "fp32")],
)
def test_what_the_dtype_cannot_hold_is_refused(
    tmp_path: Path, dtype: Any, value: float, advice: str
) -> None:
    checkpoint(tmp_path / "run", {"fine": torch.ones(3), "big": torch.tensor([np.inf, value])})
    with pytest.raises(ConfigError, match=rf"big: holds values as large as .*export as {advice}"):
        export(tmp_path / "run", tmp_path / "out", WeightsForm(dtype=dtype))
    assert not (tmp_path / "out").exists()


def damage(path: Path) -> None:
    flip_in(path, datasets(path)[0], 100)


@pytest.mark.parametrize("name", ["safetensors", "torch"])
def test_damaged_checkpoint_is_not_exported(tmp_path: Path, name: Any) -> None:
    path = checkpoint(tmp_path / "run", state())
    damage(path)
    said = r"/state/master \(first.weight\[0:91\], large.weight"
    with pytest.raises(CorruptCheckpoint, match=said):
        export(path, tmp_path / "exported" / "out", WeightsForm(format=name))
    assert list((tmp_path / "exported").iterdir()) == []


def test_newest_sound_one_is_exported(tmp_path: Path) -> None:
    old, new = state(1), state(2)
    checkpoint(tmp_path / "run", old)
    newer = checkpoint(tmp_path / "other", new, step=4).rename(tmp_path / "run" / "step-000000004")
    found = export(tmp_path / "run", tmp_path / "new", WeightsForm(format="torch"))
    assert found.checkpoint == newer
    assert same_state(torch.load(tmp_path / "new", weights_only=True), new)
    damage(newer)
    assert export(tmp_path / "run", tmp_path / "old", WeightsForm(format="torch")).step == 3
    assert same_state(torch.load(tmp_path / "old", weights_only=True), old)
    damage(tmp_path / "run" / "step-000000003")
    with pytest.raises(CorruptCheckpoint, match=r"step-000000004.*1 older ones are not sound"):
        export(tmp_path / "run", tmp_path / "none")


@pytest.mark.mpi
@pytest.mark.parametrize("form", [WeightsForm(shard_mib=1), WeightsForm(dtype="bf16")], ids=str)
def test_all_ranks_write_what_one_process_writes(world: World, form: WeightsForm) -> None:
    run, team = world.folder / "run", Ranks(world.topology)
    world.on_root(checkpoint, run, state())
    world.on_root(export, run, world.folder / "alone", form)
    steps, calls = SafeFile.steps, []

    def noted(writer: SafeFile, name: str, pieces: Any) -> Any:
        calls.append(name)
        return steps(writer, name, pieces)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SafeFile, "steps", noted)
        found = export(run, world.folder / "all", form, team=team)
    world.check(found == Exported(run / "step-000000003", 3, len(state()) - 1, found.nbytes))
    world.check(calls, "a rank has written nothing")

    def same() -> None:
        alone = sorted((world.folder / "alone").iterdir())
        assert [path.name for path in alone] == sorted(os.listdir(world.folder / "all"))
        for path in alone:
            assert path.read_bytes() == (world.folder / "all" / path.name).read_bytes()

    world.on_root(same)
    world.raises(ConfigError, "is there already", export, run, world.folder / "all", team=team)


@pytest.mark.mpi
def test_what_one_rank_finds_wrong_all_ranks_refuse(world: World) -> None:
    run, team = world.folder / "run", Ranks(world.topology)
    out = world.folder / "made" / "out"
    world.on_root(checkpoint, run, state())

    def damage_what_the_last_rank_reads() -> None:
        (master, *_) = datasets(run / "step-000000003")
        flip_in(run / "step-000000003", master, master.numel - 1)

    world.on_root(damage_what_the_last_rank_reads)
    world.raises(CorruptCheckpoint, "/state/master", export, run, out, team=team)
    world.check(not out.parent.exists() or not os.listdir(out.parent))


def test_copy_under_another_steps_name_is_exported_where_it_is_asked_for_alone(
    tmp_path: Path,
) -> None:
    path = checkpoint(tmp_path / "run", state())
    copied = path.with_name(step_folder(20))
    shutil.copytree(path, copied)
    assert export(tmp_path / "run", tmp_path / "newest").checkpoint == path
    assert export(copied, tmp_path / "asked").checkpoint == copied
    found = verify(copied)
    assert found.verdict is Verdict.CORRUPT
    assert "named after step 20 and holds step 3" in found.problems[0]
    assert verify(path).verdict is Verdict.SOUND


def test_nothing_is_written_over(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "run", state())
    (tmp_path / "out").mkdir()
    export(path, tmp_path / "out")
    for form in (WeightsForm(), WeightsForm(format="torch")):
        with pytest.raises(ConfigError, match="out: is there already; give another name"):
            export(path, tmp_path / "out", form)
    with pytest.raises(ConfigError, match="no checkpoint there"):
        export(tmp_path / "out", tmp_path / "more")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard_mib": 0}, "shard_mib: got 0, expected at least 1"),
        ({"layout": "gpt2", "format": "torch"}, "the layout gpt2 is a folder of safetensors"),
        ({"heads": 3}, "heads belong to a layout of transformers"),
    ],
)
def test_form_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WeightsForm(**options)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["hpczero", "gpt2"])
def test_memory_is_that_of_one_tensor(tmp_path: Path, layout: Any) -> None:
    """Of more than 200 MiB; a tensor that is turned round is whole in memory, others are not."""
    sizes = {"vocab_size": 30_011, "hidden": 1024, "ffn_multiple": 10}
    model = tiny_gpt(layers=1, heads=4, **sizes)
    path = gpt_checkpoint(tmp_path / "run", model, heads=4)
    assert sum(parameter.nbytes for parameter in model.parameters()) > 200 * MIB
    largest = 40 * MIB if layout == "gpt2" else 0  # 10,240 x 1024 of fp32
    tracemalloc.start()
    export(path, tmp_path / "out", WeightsForm(layout=layout))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < largest + 56 * MIB  # two slabs of 16, pieces of 4


# --- Hugging Face's GPT-2 --------------------------------------------------------------------------------------------


def test_gpt2_layout_says_its_sizes(tmp_path: Path) -> None:
    model = tiny_gpt(dropout=0.25, ffn_multiple=3)
    config = model.config
    path = gpt_checkpoint(tmp_path / "run", model, heads=config.heads, dropout=0.25)
    export(path, tmp_path / "out", WeightsForm(layout="gpt2"))
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said["activation_function"] == "gelu_new"
    assert said["tie_word_embeddings"] is True
    assert (said["n_head"], said["n_inner"]) == (config.heads, 3 * config.hidden)
    assert (said["n_positions"], said["resid_pdrop"]) == (config.context, 0.25)


def test_heads_are_asked_for_where_nothing_tells(tmp_path: Path) -> None:
    model = tiny_gpt()
    unknown = gpt_checkpoint(tmp_path / "a", model)
    known = gpt_checkpoint(tmp_path / "b", model, heads=2)
    for path, heads, message in (
        (unknown, None, r"does not say how many attention heads.*give --heads"),
        (unknown, 5, "heads: got 5, expected a divisor of the hidden size"),
        (known, 3, "heads: got 3, and the checkpoint says 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            export(path, tmp_path / "out", WeightsForm(layout="gpt2", heads=heads))
    export(unknown, tmp_path / "out", WeightsForm(layout="gpt2", heads=2))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["n_head"] == 2


def test_other_models_are_no_gpt2(tmp_path: Path) -> None:
    model = tiny_gpt(positions="rotary", hidden=20)
    rotary = gpt_checkpoint(tmp_path / "a", model, heads=2, positions="rotary")
    said = r"'rotary', expected 'learned'; give --layout transformers"
    with pytest.raises(ConfigError, match=said):
        export(rotary, tmp_path / "out", WeightsForm(layout="gpt2"))
    more = {**dict(tiny_gpt().named_parameters()), "calls": torch.tensor(1)}
    other = checkpoint(tmp_path / "b", more)
    with pytest.raises(ConfigError, match=r"GPT-2 has no calls.*export it with --layout hpczero"):
        export(other, tmp_path / "out", WeightsForm(layout="gpt2", heads=2))


@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-5), ("bf16", 0.05)])
def test_transformers_gives_the_same_logits(
    tmp_path: Path, tie: bool, positions: Any, dtype: Any, tolerance: float
) -> None:
    """Tolerance: logits are of order 1; sums of 24 to 72 products in another order, weights rounded to bf16."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    rotary: dict[str, Any] = {"hidden": 16, "heads": 2} if positions == "rotary" else {}
    model = tiny_gpt(tie_embeddings=tie, positions=positions, **rotary).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    said = {name: getattr(model.config, name) for name in ("heads", "positions", "context")}
    path = gpt_checkpoint(tmp_path / "run", model, **said)
    export(path, tmp_path / "out", WeightsForm(layout="transformers", dtype=dtype))
    theirs, said = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not any(said[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = tiny_tokens(0)
    with torch.no_grad():
        found, expected = theirs.eval()(tokens).logits, model(tokens)
    most = tolerance * float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=most)


@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("kind", ["bytes", "bpe", "library"])
def test_the_runs_tokenizer_goes_along(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    text = "Was it a bird? No:\n\n\tit's 3 ünïcödé birds, 鳥 \U0001f426\n" * 3
    ours: Any = ByteTokenizer()
    if kind == "bpe":
        ours = BPETokenizer.train([text.encode()], 300)
    elif kind == "library":  # it adds a token, which no row was trained with
        learnt = BPETokenizer.train([text.encode()], 300).model
        learnt.add_special_tokens(["<|endoftext|>"])
        end = learnt.token_to_id("<|endoftext|>")
        learnt.post_processor = tokenizers.processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", end)]
        )
        ours = LibraryTokenizer(learnt, end)
    model = tiny_gpt(vocab_size=ours.vocab_size)
    path = gpt_checkpoint(tmp_path / "run", model, tokenizer=ours.to_json(), heads=2)
    export(path, tmp_path / "out", WeightsForm(layout="transformers"))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = ours.encode(text.encode()).tolist()
    assert theirs(text)["input_ids"] == ids
    assert theirs.decode(ids) == text
    assert theirs.eos_token_id == ours.separator == theirs.convert_tokens_to_ids("<|endoftext|>")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert config.eos_token_id == ours.separator


# --- the command -----------------------------------------------------------------------------------------------------


def test_command_exports_without_torch_and_mpi(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "run", state())
    options = ("--dtype", "bf16", "--shard_mib", "1")
    finished, loaded = command("export", path, tmp_path / "out", *options)
    assert finished.returncode == 0, finished
    assert not {"torch", "mpi4py", "h5py"} & loaded
    assert "9 tensors" in finished.stdout
    assert read_all(tmp_path / "out")["scale"].dtype == torch.bfloat16


def test_command_imports_without_mpi(tmp_path: Path) -> None:
    weights = tmp_path / "w.safetensors"
    save_file({"a": torch.randn(3), "x.mean": torch.ones(2)}, weights)
    options = ("--tied", "b=a", "--buffers", "*.mean", "--step", 7)
    finished, loaded = command("import", weights, tmp_path / "run", *options)
    assert finished.returncode == 0, finished
    assert "mpi4py.MPI" not in loaded
    manifest = read_manifest(tmp_path / "run" / "step-000000007")
    assert [row.name for row in manifest.table.rows] == ["a", "b"]
    assert manifest.meta["buffers"] == [["x.mean", "float32", [2]]]
    finished, _ = command("import", weights, tmp_path / "run2", "--tied", "b")
    assert finished.returncode == 78
    assert "expected FURTHER=NAME" in finished.stderr


# --- what ranks have saved -------------------------------------------------------------------------------------------


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_export_of_a_training_is_its_full_state(world: World) -> None:
    with program_of(world.comm, world.size, stage=3) as program:
        program.train(2)
        expected = hpczero.full_state_dict(program.model)
        program.save(world.folder / "run")

    def judge() -> None:
        assert expected is not None
        export(world.folder / "run", world.folder / "out.pt", WeightsForm(format="torch"))
        assert same_state(torch.load(world.folder / "out.pt", weights_only=True), expected)
        export(world.folder / "run", world.folder / "out")
        assert same_state(read_all(world.folder / "out"), once(expected))

    world.on_root(judge)
