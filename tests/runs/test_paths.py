"""``runs/NAME`` is what sampling takes: a run, its checkpoints or one of them, and the tokenizer that belongs to it."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hpczero.checkpoint.disk.folder import read_manifest
from hpczero.checkpoint.disk.format import MANIFEST_FILE
from hpczero.checkpoint.foreign.exporting import export
from hpczero.data import Tokenizer
from hpczero.models import GPT, GPTConfig, generate
from tests.checkpoint.damage import resigned, shorten
from tests.helpers.mpirun import run_ranks, run_typed
from tests.helpers.runs import steps, train
from tests.runs.test_resume import start
from tests.runs.two_runs import (
    CHOICES,
    NUM_TOKENS,
    PROMPT,
    call,
    damage,
    hollow_out,
    sample,
    step_path,
    tokenizer_of,
)

pytestmark = pytest.mark.limit(300)  # many starts of jobs each

ONE_AFTER_THE_OTHER = """
import json, sys
from hpczero.errors import HpcZeroError, launcher_rank, report
from hpczero.sample import main
for words in json.loads(sys.argv[1]):
    sys.argv, code = ["sample", *words], 0
    try:
        main()
    except HpcZeroError as error:
        code = report(error)
    if launcher_rank() == 0:
        sys.stdout.write(f"{code}=====")
        sys.stdout.flush()
"""


def samples(*calls: Sequence[object], ranks: int = 2) -> tuple[list[str], str]:
    """What each of ``calls`` of the command writes, or its exit code, and what all say on stderr; in one job."""
    words = json.dumps([[*map(str, call), *CHOICES] for call in calls])
    job = run_typed(ranks, ["-c", ONE_AFTER_THE_OTHER, words], timeout=100).ended()
    assert "Traceback" not in job.stderr, job
    parts = job.stdout.split("=====")[:-1]
    assert len(parts) == len(calls), job
    return [part.removesuffix("\n0") for part in parts], job.stderr


def text_of(checkpoint: Path, tokenizer: Tokenizer, scratch: Path) -> str:
    """What a dense model writes that was filled with the weights that ``export`` gives."""
    out = scratch / f"exported-{len(list(scratch.iterdir()))}"
    export(checkpoint, out)
    tensors = {
        name: value for file in out.glob("*.safetensors") for name, value in load_file(file).items()
    }
    model = GPT(GPTConfig(**read_manifest(checkpoint).meta["extra"]["model"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors.pop(name))
    assert not tensors
    threads = torch.get_num_threads()
    # As in a job; where others are at work, more of them wait for one another
    torch.set_num_threads(1)
    tokens = generate(
        model,
        torch.from_numpy(tokenizer.encode(PROMPT.encode())),
        num_tokens=NUM_TOKENS,
        context=model.config.context,
        temperature=0.8,
        top_k=50,
    )
    torch.set_num_threads(threads)
    return tokenizer.decode(tokens.tolist()).decode(errors="replace")


@pytest.fixture(scope="module")
def texts(
    made: Path, books: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """What the checkpoints of both runs write."""
    return {
        f"{name}{step}": text_of(
            step_path(made, step, name), tokenizer_of(book), tmp_path_factory.mktemp("out")
        )
        for name, book in zip("ro", books, strict=True)
        for step in (2, 4, 6)
    }


# --- sampling


@pytest.mark.parametrize("ranks", [1, 2])
def test_text_of_a_stopped_run_is_that_of_its_exported_checkpoint(
    runs: Path, texts: dict[str, str], ranks: int
) -> None:
    places = {"": 6, "checkpoints": 6, "checkpoints/step-000000004": 4}
    found, said = samples(*([runs / "r" / place] for place in places), ranks=ranks)
    assert found == [texts[f"r{step}"] for step in places.values()], said
    paths = [step_path(runs, step) for step in places.values()]
    told = [line for line in said.splitlines() if not line.startswith("start: ")]
    assert told == [f"weights of step {read_manifest(p).step}: {p}" for p in paths]


@pytest.mark.slow
def test_running_run_is_sampled_and_neither_locked_nor_stopped(tmp_path: Path) -> None:
    """It saves at every step and keeps one checkpoint, so most of what is chosen is deleted soon after."""
    with start(tmp_path, train__steps=100_000, checkpoint__every=1, checkpoint__keep=1) as running:
        while not steps(tmp_path):
            assert running.process.poll() is None, running.said
        checkpoints = tmp_path / "r" / "checkpoints"
        locks = [file.name for file in checkpoints.glob(".lock*")]
        seen = []
        for ranks in (1, 2):
            job = sample(tmp_path / "r", ranks=ranks).ended()
            assert job.stdout.startswith(PROMPT)
            seen.append(job.stderr.split("weights of step ")[1].split(":")[0])
        assert len(locks) == 1
        assert [file.name for file in checkpoints.glob(".lock*")] == locks
        assert running.process.poll() is None
        os.kill(running.ranks[0], signal.SIGUSR1)
        assert running.wait() == 75, running.said
    first, second = (int(step.replace(",", "")) for step in seen)
    assert first < second <= steps(tmp_path)[0]
    assert "no checkpoint" not in running.said


DELETED_MEANWHILE = """
import shutil
from pathlib import Path
from hpczero.run import sampling
from hpczero.errors import run
from hpczero.sample import main
chosen = sampling._next
def deletes(path, tried, failed):
    place, asked_for = chosen(path, tried, failed)
    if not tried:
        shutil.rmtree(place)
        shutil.move(Path(place).parents[1] / "newer", Path(place).with_name("step-000000006"))
    return place, asked_for
sampling._next = deletes
run(main)
"""


def test_checkpoint_that_is_deleted_meanwhile_is_answered_by_what_is_newest_then(
    runs: Path, texts: dict[str, str]
) -> None:
    step_path(runs, 6).rename(runs / "r" / "newer")
    job = run_ranks(2, ["-c", DELETED_MEANWHILE, runs / "r", *CHOICES], timeout=100).ended()
    assert job.stdout == texts["r6"] + "\n", job
    assert job.stderr.count("step-000000004: was deleted meanwhile") == 1, job


def test_corrupt_checkpoint_is_named_and_an_older_sampled(
    runs: Path, texts: dict[str, str]
) -> None:
    harms: dict[str, Callable[[Path], object]] = {
        "values": damage,
        "manifest": lambda path: (path / MANIFEST_FILE).write_text("{}"),
        "size": lambda path: shorten(path, -1),
        "name": lambda path: path.rename(path.with_name("step-000000009")),
        "nothing": hollow_out,
    }
    for name, harm in harms.items():
        shutil.copytree(runs / "r", runs / name)
        harm(step_path(runs, 6, name))
    found, said = samples(*([runs / name] for name in harms))
    assert found == [texts["r4"]] * len(harms), said
    for name in harms:
        newest = step_path(runs, 9 if name == "name" else 6, name)
        assert said.count(f"{newest}: ") == 1, said
        assert f"sampling from the older {step_path(runs, 4, name)}" in said
    assert f"{step_path(runs, 6, 'values')}: corrupt: elements 0 to " in said
    assert "of /state/master (wte.weight[" in said


def test_corrupt_checkpoint_that_is_asked_for_or_the_last_one_ends_with_65(runs: Path) -> None:
    damage(step_path(runs, 6))
    damage(step_path(runs, 4))
    (step_path(runs, 2) / MANIFEST_FILE).unlink()
    found, said = samples([step_path(runs, 6)], [runs / "r"])
    assert found == ["65", "65"], said
    assert "2 older ones are not sound either" in said
    job = sample(step_path(runs, 6), ranks=2).ended(65)
    assert "step-000000006: corrupt: elements" in job.stderr, job
    assert (job.stdout, "Traceback" in job.stderr) == ("", False), job


def test_final_weights_are_sampled_unless_a_checkpoint_is_newer_or_they_are_damaged(
    runs: Path, books: tuple[Path, Path], texts: dict[str, str], tmp_path: Path
) -> None:
    shutil.copytree(runs / "o", runs / "old")
    old = (runs / "o" / "model.safetensors").read_bytes()
    changes: dict[str, Any] = {"run__name": "o", "train__steps": 8, "checkpoint__every": 2}
    train(runs, 1, data__path=books[1], **changes).ended()
    text = text_of(step_path(runs, 8, "o"), tokenizer_of(books[1]), tmp_path)
    new = (runs / "o" / "model.safetensors").read_bytes()
    contents = {"newer": old, "short": new[:-1], "flipped": new[:-5] + b"12345"}
    for name, content in contents.items():
        shutil.copytree(runs / "o", runs / name)
        (runs / name / "model.safetensors").write_bytes(content)
    found, said = samples([runs / "old"], [runs / "o"], *([runs / name] for name in contents))
    assert found == [texts["o6"], text, text, text, text], said
    chosen = [line for line in said.splitlines() if line.startswith("weights of step")]
    assert chosen == [
        f"weights of step 6: {runs / 'old' / 'model.safetensors'}",
        f"weights of step 8: {runs / 'o' / 'model.safetensors'}",
        *(f"weights of step 8: {step_path(runs, 8, name)}" for name in contents),
    ]
    for name in ("short", "flipped"):
        assert f"{runs / name / 'model.safetensors'}: " in said
        assert f"sampling from the older {step_path(runs, 8, name)}" in said


# --- tokenizers


def test_what_is_set_aside_keeps_its_tokenizer_and_the_new_line_has_its_own(
    runs: Path, books: tuple[Path, Path], texts: dict[str, str], tmp_path: Path
) -> None:
    """Both have the same number of ids, so nothing but the tokenizers themselves tells them apart."""
    assert text_of(step_path(runs, 6), tokenizer_of(books[1]), tmp_path) != texts["r6"]
    changes = {"train__steps": 8, "checkpoint__every": 8}
    train(runs, 1, resume__from=runs / "o", data__path=books[1], **changes).ended()
    (first,) = (runs / "r" / "checkpoints").glob("aside-*")
    new = text_of(step_path(runs, 8), tokenizer_of(books[1]), tmp_path)
    # With results of its own it begins elsewhere once more: they are set aside, too.
    shutil.copytree(runs / "r", runs / "again")
    train(runs, 1, run__name="again", resume__from=first, data__path=books[0], **changes).ended()
    second = max((runs / "again" / "checkpoints").glob("aside-*"))
    assert (second / "model.safetensors").exists()
    newest = text_of(step_path(runs, 8, "again"), tokenizer_of(books[0]), tmp_path)
    one = first / "step-000000006"
    expected: list[tuple[Sequence[object], str]] = [
        ([first], texts["r6"]),
        ([one], texts["r6"]),
        ([runs / "r"], new),
        ([second], new),
        ([second / "step-000000008"], new),
        ([runs / "again" / "checkpoints"], newest),
        # Named all the same, the other token file is refused.
        ([one, "--token-file", books[0]], texts["r6"]),
        ([one, "--token-file", books[1]], "78"),
        ([second / "model.safetensors", "--token-file", books[0]], "78"),
    ]
    found, said = samples(*(words for words, _ in expected))
    assert found == [text for _, text in expected], said
    assert f"{books[1]}: has another tokenizer (bpe of 290 ids, " in said
    assert f"{books[0]}: has another tokenizer (bpe of 290 ids, " in said


def strip(checkpoint: Path, *names: str) -> None:
    """As an earlier version saved it, or another program."""

    def change(body: dict[str, Any]) -> None:
        for name in names:
            del body["meta"]["extra"][name]

    resigned(checkpoint, change)


def test_checkpoint_without_a_tokenizer_is_read_with_the_token_file_of_its_run_alone(
    runs: Path, books: tuple[Path, Path], texts: dict[str, str]
) -> None:
    lacks = {"earlier": ["tokenizer"], "foreign": ["tokenizer", "data"], "other": ["model"]}
    for name, fields in lacks.items():
        shutil.copytree(runs / "r", runs / name)
        strip(step_path(runs, 6, name), *fields)
    right, wrong = (["--token-file", book] for book in books)
    found, said = samples(
        [runs / "earlier"],
        [runs / "earlier", *wrong],
        [runs / "earlier", *right],
        [runs / "foreign", *right],
        [runs / "other", *right],
    )
    assert found == ["78", "78", texts["r6"], texts["r6"], "78"], said
    assert f"{step_path(runs, 6, 'earlier')}: has no tokenizer in it" in said
    assert f"{books[1]}: is not what {step_path(runs, 6, 'earlier')} was trained on" in said
    assert said.count("nobody can tell whether") == 1, said
    assert "it was not saved by hpczero.train" in said


def test_run_refuses_tokens_of_another_tokenizer(runs: Path, books: tuple[Path, Path]) -> None:
    """Also where all else that a checkpoint says of its data is the same."""

    def change(body: dict[str, Any]) -> None:
        body["meta"]["extra"]["tokenizer"] = tokenizer_of(books[1]).to_json()

    resigned(step_path(runs, 6), change)
    job = train(runs, 1, data__path=books[0], train__steps=8).ended(78)
    assert "tokenizer was bpe of 290 ids, " in job.stderr, job
    strip(step_path(runs, 6), "tokenizer")  # what an earlier version saved goes on
    train(runs, 1, data__path=books[0], train__steps=8).ended()
    assert "tokenizer" in read_manifest(step_path(runs, 8)).meta["extra"]


def test_exported_weights_bring_their_tokenizer_back(
    runs: Path, texts: dict[str, str], tmp_path: Path
) -> None:
    export(runs / "o", tmp_path / "weights")
    for source, out in ((tmp_path / "weights", "exported"), (runs / "o", "final")):
        call("import", source, tmp_path / out / "step-000000006")
    found, said = samples([tmp_path / "exported"], [tmp_path / "final"], ranks=1)
    assert found == [texts["o6"]] * 2, said
