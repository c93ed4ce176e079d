"""Every kind of file that the project reads: one that is sound, and what a reader makes of it.

A subject's ``make`` fills a folder and gives the file that will come to harm; ``read`` gives all that the project's own
reader takes from that folder, as a value that can be compared. It may raise; it may write into the folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

import hpczero
from hpczero.checkpoint.__main__ import Verdict, verify
from hpczero.checkpoint.disk import lines
from hpczero.checkpoint.disk.folder import Folder, read_manifest
from hpczero.checkpoint.disk.lock import Lock
from hpczero.checkpoint.foreign.converting import convert
from hpczero.checkpoint.foreign.exporting import WeightsForm, export
from hpczero.checkpoint.foreign.weight_files import WeightFiles
from hpczero.data import ByteTokenizer, Corpus, TokenFile, prepare
from hpczero.errors import CheckpointBusy
from hpczero.models import GPT, GPTConfig
from hpczero.options.config import EvaluationOptions, RunConfig, RunOptions, TrainOptions
from hpczero.options.environment import Environment
from hpczero.options.reading import to_toml
from hpczero.run.results.folder import RunFolder
from hpczero.run.results.metrics import MetricsFile, StepMetrics, read_metrics
from hpczero.run.results.weights import Weights, write_weights
from hpczero.run.sampling import WeightSource, open_source
from hpczero.run.starting import resume
from hpczero.run.starting.attempts import Attempts
from tests.checkpoint.damage import fingerprint
from tests.checkpoint.folders import kept, old_line, there
from tests.checkpoint.foreign import checkpoint, gpt_checkpoint, other_state, state, write
from tests.checkpoint.programs import Program

SERIES = Environment(series="s", job="7")
STEPS = 40


@dataclass(frozen=True)
class Subject:
    """One kind of file.

    Attributes:
        make: fills a folder; gives the file that comes to harm.
        read: what a reader makes of the folder.
        is_text: harm that is only for text makes sense.
        signed: the harm is signed with a right digest before it is read, so other values are no silent ones.
        may_be_gone: without the file nothing is wrong.
        has_digest: a change can be seen; otherwise one that leaves a file of its format is nobody's fault.
    """

    make: Callable[[Path], Path]
    read: Callable[[Path], Any]
    is_text: bool = False
    signed: bool = False
    may_be_gone: bool = False
    has_digest: bool = True


# --- checkpoints -----------------------------------------------------------------------------------------------------


@cache
def program() -> Program:
    """The one model of this process, on one rank."""
    return Program(hpczero.Topology.of_world())


def checkpoints(folder: Path, name: str) -> Path:
    """An older one, and the one that comes to harm."""
    program().train(1)
    program().save(folder)
    program().train(1)
    return program().save(folder) / name


def load_state(folder: Path) -> Any:
    """What a model is after a load; harm to HDF5's own part is found by ``verify`` alone."""
    found = program().load(folder)
    return found.step, found.extra, fingerprint(program())


def load(folder: Path) -> Any:
    """And ``verify`` calls what is loaded sound."""
    found = load_state(folder)
    loaded = next(path for path, manifest in Folder(folder).valid() if manifest.step == found[0])
    assert verify(loaded).verdict is Verdict.SOUND, "loaded from one that verify calls damaged"
    return found


def load_and_save(folder: Path) -> Any:
    before = load(folder)
    program().step = 9
    saved = program().save(folder)
    program().step = before[0]
    return before, saved.name, load(folder)[0]


def setting_aside(folder: Path) -> Path:
    """As a job leaves it that was killed right after it had decided."""
    path = folder / "ckpt"
    found = old_line(path).candidates()
    note = path / lines.NOTE
    note.write_text(lines.note_text(lines.new_aside(path), found[:2]))
    return note


def finish_setting_aside(folder: Path) -> Any:
    """What counts before the next job has the lock, and after."""
    path = folder / "ckpt"
    before = there(path)
    Folder(path).sweep()
    return before, there(path), kept(path)


def locked(folder: Path) -> Path:
    """By a job on another host, which lives."""
    file = folder / ".lock-0123456789abcdef"
    said = {"state": "holds", "host": "elsewhere", "pid": 17, "started": "5", "job": ""}
    file.write_text(json.dumps({**said, "restart": "0"}))
    return file


def take_lock(folder: Path) -> str:
    try:
        with Lock(folder):
            return "taken"
    except CheckpointBusy:
        return "busy"


# --- token files -----------------------------------------------------------------------------------------------------


def token_file(folder: Path) -> Path:
    text = folder / "text"
    text.write_text("".join(f"line {n} of the book\n" for n in range(9000)))
    prepare(Corpus.of_paths([text]), folder / "tokens.h5")
    text.unlink()
    return folder / "tokens.h5"


def tokens(folder: Path) -> Any:
    with TokenFile.open(folder / "tokens.h5") as file:
        seen: list[Any] = [file.tokenizer.to_json(), file.source_sha256]
        for split in (file.train, file.validation):
            seen += [split.documents, split.text_nbytes, str(split.dtype), len(split)]
            seen.append(hashlib.sha256(split[: len(split)].tobytes()).hexdigest())
    return seen


# --- run folders -----------------------------------------------------------------------------------------------------


def config() -> RunConfig:
    train = TrainOptions(steps=STEPS, global_batch=12)
    return RunConfig(run=RunOptions(name="r"), train=train, evaluation=EvaluationOptions(every=10))


def run_folder(folder: Path) -> RunFolder:
    found = RunFolder(folder / "r")
    (found.checkpoints / "step-000000020").mkdir(parents=True)
    found.config.write_text(to_toml(config()))
    return found


def config_file(folder: Path) -> Path:
    return run_folder(folder).config


def begin_again(folder: Path) -> Any:
    """Where the run would go on, and whether it has anything to do."""
    found = RunFolder(folder / "r")
    chosen = resume.choose(config(), found)
    resume.tell_changes(found, config())
    return None if chosen is None else chosen.relative_to(folder)


def metrics_file(folder: Path) -> Path:
    file = MetricsFile(folder / "metrics.jsonl")
    for step in range(1, 31):
        values: dict[str, Any] = {f.name: step / 7 for f in dataclasses.fields(StepMetrics)}
        values |= {f.name: None for f in dataclasses.fields(StepMetrics) if "device" in f.name}
        values |= {"lm_eval": {"mine/acc": 0.5}}
        file.write(StepMetrics(**{**values, "step": step, "tokens": 12 * step}))
    file.close()
    return folder / "metrics.jsonl"


def metrics(folder: Path) -> Any:
    """As a run that goes on after step 20 leaves them."""
    MetricsFile(folder / "metrics.jsonl", start=20).close()
    return [step.to_json() for step in read_metrics(folder / "metrics.jsonl")]


def attempts_file(folder: Path) -> Path:
    found = run_folder(folder)
    for _ in range(2):
        attempts = Attempts(found, SERIES)
        attempts.start(ranks=2, host="host1")
        attempts.begin(20)
        attempts.end(21, 75)
    return found.attempts


def attempt(folder: Path) -> Any:
    """What the next start of the series does."""
    attempts = Attempts(RunFolder(folder / "r"), SERIES)
    finished = attempts.finished(STEPS)
    attempts.start(ranks=2, host="host1")
    return finished, to_toml(attempts.settle(config()))


# --- weights ---------------------------------------------------------------------------------------------------------


def exported(folder: Path) -> Path:
    export(checkpoint(folder / "run", state()), folder / "weights", WeightsForm(dtype="bf16"))
    (file,) = (folder / "weights").glob("*.safetensors")
    return file


def index(folder: Path) -> Path:
    exported(folder)
    (file,) = (folder / "weights").glob("*.index.json")
    return file


def foreign_safetensors(folder: Path) -> Path:
    (folder / "weights").mkdir()
    return write(folder / "weights", other_state(), "safetensors")


def torch_file(folder: Path) -> Path:
    (folder / "weights").mkdir()
    return write(folder / "weights", other_state(), "torch")


def gpt(**sizes: Any) -> GPT:
    model = GPT(GPTConfig(vocab_size=257, context=8, layers=1, hidden=8, heads=2, **sizes))
    model.initialize_all(seed=3)
    return model


def gpt2_config(folder: Path) -> Path:
    """Beside weights of GPT-2: sizes that no tensor tells."""
    model = gpt(tie_embeddings=True)
    found = gpt_checkpoint(folder / "run", model, heads=2)
    export(found, folder / "weights", WeightsForm(layout="gpt2"))
    return folder / "weights" / "config.json"


def imported_gpt2(folder: Path) -> Any:
    """As the command makes a checkpoint of them."""
    found = read_manifest(convert(folder / "weights", folder / "out", layout="gpt2"))
    return found.meta["extra"], found.table.rows, [d.digests for d in found.datasets]


def weights(folder: Path) -> Any:
    found = WeightFiles(folder / "weights")
    found.check()
    return {n: (str(h.dtype), h.shape, h.whole().tolist()) for n, h in sorted(found.items())}


def final_weights(folder: Path) -> Path:
    model, file = gpt(), folder / "model.safetensors"
    parameters = dict(model.named_parameters())
    write_weights(file, parameters, model=model.config, tokenizer=ByteTokenizer(), step=7)
    return file


def run_checkpoint(folder: Path, name: str) -> Path:
    """A run with an older one, and the one that comes to harm; they say their model and their tokenizer."""
    final = final_weights(folder)
    for step in (4, 7):
        made = convert(final, folder / "made" / f"step-{step:09d}")
        made.rename(folder / made.name)
    final.unlink()
    shutil.rmtree(folder / "made")
    return folder / "step-000000007" / name


def sampled_checkpoint(folder: Path) -> Any:
    """As the sampling command chooses and takes one."""
    found = open_source(folder, program().topology)
    try:
        return taken(found)
    finally:
        found.close()


def sampled(folder: Path) -> Any:
    """As the sampling command takes final weights."""
    return taken(Weights(folder))


def taken(found: WeightSource) -> Any:
    with torch.device("meta"):
        model = GPT(found.model)
    values = {}
    for name, parameter in model.named_parameters():
        values[name] = torch.empty(parameter.shape)
        found.read_into(name, values[name])
    texts = [found.tokenizer.to_json(), found.step, found.model]
    return texts, {name: value.tolist() for name, value in values.items()}


SUBJECTS: dict[str, Subject] = {
    "manifest": Subject(lambda f: checkpoints(f, "manifest.json"), load, is_text=True),
    "state.h5": Subject(lambda f: checkpoints(f, "state.h5"), load_state),
    "LATEST": Subject(
        lambda f: checkpoints(f, "manifest.json").parents[1] / "LATEST", load_and_save, is_text=True
    ),
    "note of setting aside": Subject(
        setting_aside, finish_setting_aside, is_text=True, may_be_gone=True
    ),
    "lock": Subject(locked, take_lock, is_text=True, may_be_gone=True),
    "token file": Subject(token_file, tokens),
    "metrics": Subject(metrics_file, metrics, is_text=True),
    "attempts": Subject(attempts_file, attempt, is_text=True),
    "config": Subject(config_file, begin_again, is_text=True),
    "safetensors, exported": Subject(exported, weights),
    "safetensors, index": Subject(index, weights, is_text=True),
    "safetensors, final weights": Subject(final_weights, sampled),
    "safetensors, foreign": Subject(foreign_safetensors, weights, has_digest=False),
    "safetensors, config of GPT-2": Subject(
        gpt2_config, imported_gpt2, is_text=True, may_be_gone=True, has_digest=False
    ),
    "torch file": Subject(torch_file, weights),
    "manifest, sampled": Subject(
        lambda f: run_checkpoint(f, "manifest.json"), sampled_checkpoint, is_text=True
    ),
    "state.h5, sampled": Subject(lambda f: run_checkpoint(f, "state.h5"), sampled_checkpoint),
}
