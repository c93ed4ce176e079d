"""The training command on a device: the check ``train``. Without MPI itself, because it starts jobs of two ranks.

Two ranks share the device at stage 3 in bf16. One run goes straight through, another resumes from its checkpoint in the
middle. With deterministic operations the losses after the resume are those of the first run, bit for bit. The
checkpoints are verified.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from scaling.evidence.record import Row
from scaling.gpu.jobs import launcher

RANKS = 2
SHOWN = "step loss step_ms tokens_per_s checkpoint_ms device_exposed_ms device_peak_nbytes"
# Of both runs.
OPTIONS = (
    "--parallel.stage 3 --parallel.precision bf16 --train.accumulation 1 --train.warmup 2 "
    "--log.every 1 --log.plot false --log.tensorboard false --evaluation.every 0 "
    "--evaluation.batches 1 --checkpoint.keep 2"
)
LAST = 2  # steps of a run that are rows
TAIL_CHARACTERS = 1500


def train(which: str = "small", *, twin: bool) -> Iterator[Row]:
    """Train, save, resume, verify. Not collective.

    Args:
        which: ``small``, with deterministic operations, or ``124M``, as one trains.
        twin: on the host.
    """
    small = which == "small"
    half, steps = (4, 8) if small or twin else (10, 20)
    model = ["--model.preset", "gpt-micro" if twin else "gpt-nano" if small else "gpt2"]
    options = [*model, "--train.micro_batch", "2" if twin else "4" if small else "8"]
    options += ["--parallel.deterministic", str(small).lower(), "--train.steps", str(steps)]
    options += ["--checkpoint.every", str(half), "--parallel.device", "cpu" if twin else "cuda"]
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder)
        options += [*OPTIONS.split(), "--run.folder", folder, "--data.cache", f"{folder}/tokens"]
        command = [*launcher(RANKS), sys.executable, "-m", "hpczero.train", *options]
        checkpoint = runs / "straight" / "checkpoints" / f"step-{half:09d}"
        for name, more in (("straight", []), ("resumed", ["--resume.from", str(checkpoint)])):
            said = _run([*command, "--run.name", name, *more])
            if said:
                yield {"model": which, "run": name, "said": said}
                return
            for row in list(_metrics(runs / name).values())[-LAST:]:
                yield {"model": which, "run": name, **{key: row.get(key) for key in SHOWN.split()}}
        straight, resumed = (_metrics(runs / name) for name in ("straight", "resumed"))
        same = [step for step in resumed if resumed[step]["loss"] == straight[step]["loss"]]
        equal = bool(resumed) and len(same) == len(resumed)
        yield {"model": which, "run": "compared", "equal": equal, "deterministic": small}
        said = _run([sys.executable, "-m", "hpczero.checkpoint", "verify", str(runs / "resumed")])
        yield {"model": which, "run": "verified", "right": not said, "said": said}


def _run(command: Sequence[str]) -> str:
    """Nothing if it ended well; else how it ended, with the last it said. The check has a limit of time."""
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return ""
    last = (done.stdout + done.stderr)[-TAIL_CHARACTERS:]
    return f"exit code {done.returncode}\n{last}"


def _metrics(run: Path) -> dict[int, Row]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {row["step"]: row for row in map(json.loads, lines) if "loss" in row}
