"""Saves of whole weights over an older save, killed before any change of the disk, and what can be loaded afterwards.

``files FOLDER`` kills the last part of a save, in which a new save takes the place of an older one, at every change;
``trainer FOLDER CHANGES...`` kills ``save_model`` of a trainer on one rank, ``adapter FOLDER CHANGES...`` that of a
model with an adapter. Children are forked before MPI is started. Each says case, change, how it ended, and what
transformers (or peft) and hpczero load: ``old``, ``new``, ``refused`` or ``MIXED``.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.hf.trainer.kill_program import die_before

MOST = 60  # changes of the disk in a save
OLD, NEW = 1.0, 2.0
SMALL = "12KB"  # so that there are several files


def filled(value: float) -> Any:
    """A model whose parameters all have one value."""
    from tests.hf.trainer.runs import llama

    model = llama(bos_token_id=int(value))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def adapted(value: float) -> Any:
    """A model with an adapter of one value, which its configuration has too."""
    import peft

    config = peft.LoraConfig(r=2, lora_alpha=int(value), target_modules=["q_proj"])
    model = peft.get_peft_model(filled(5.0), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.fill_(value)
    return model


def named(values: set[float]) -> str:
    """What these values are of; anything but NEW is of the old save."""
    kinds = {"new" if value == NEW else "old" for value in values}
    return kinds.pop() if len(kinds) == 1 else "MIXED"


def by_transformers(place: Path) -> str:
    """What ``from_pretrained`` makes of a folder."""
    import transformers

    try:
        found: Any = transformers.LlamaForCausalLM.from_pretrained(place, output_loading_info=True)
    except (OSError, ValueError) as error:
        return "refused" if str(place) in str(error) else f"unnamed:{error}"
    model, told = found
    if any(told.values()):
        return "MIXED"
    values = {
        value for tensor in model.state_dict().values() for value in tensor.flatten().tolist()
    }
    return named({*values, float(model.config.bos_token_id)})


def by_peft(place: Path) -> str:
    """What peft makes of a folder."""
    import peft

    try:
        model = peft.PeftModel.from_pretrained(filled(5.0), place)
    except (OSError, ValueError) as error:
        return "refused" if str(place) in str(error) else f"unnamed:{error}"
    found = {
        value
        for name, each in model.state_dict().items()
        if "lora_" in name
        for value in each.flatten().tolist()
    }
    config: Any = model.peft_config["default"]
    return named({*found, float(config.lora_alpha)})


def by_hpczero(place: Path) -> str:
    """What the reader of ``hpczero.hf.load`` makes of a folder."""
    from hpczero.errors import HpcZeroError
    from hpczero.hf.files import WeightFolder

    try:
        folder = WeightFolder(place)
        folder.check(0, 1)
    except HpcZeroError as error:
        return "refused" if str(place) in str(error) else f"unnamed:{error}"
    return named({v for key in folder.entries for v in folder.box(key).flatten().tolist()})


def forked(child: Callable[[], None]) -> int:
    """How a child ended: -9 if it was killed, 3 if it had fewer changes."""
    process = os.fork()
    if process == 0:
        try:
            child()
            os._exit(3)
        except BaseException as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            sys.stderr.flush()
        os._exit(4)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def say(case: str, change: int, ended: int, place: Path, load: Callable[[Path], str]) -> None:
    """One line for the test."""
    mine = by_hpczero(place) if load is by_transformers else "-"
    sys.stdout.write(f"CASE {case} {change} {ended} {load(place)} {mine}\n")
    sys.stdout.flush()


def files(root: Path) -> None:
    """The last part of a save, in all its ways."""
    from hpczero.hf.trainer.checkpoints import bring_in

    sources = {}
    for value in (OLD, NEW):
        for name, size in (("several", SMALL), ("single", "1GB"), ("more", "5KB")):
            sources[name, value] = root / f"{name}-{value}"
            filled(value).save_pretrained(sources[name, value], max_shard_size=size)
        sources["adapter", value] = root / f"adapter-{value}"
        adapted(value).save_pretrained(sources["adapter", value])
    for before, after in (
        ("several", "several"),
        ("single", "single"),
        ("several", "single"),
        ("single", "several"),
        ("more", "several"),
        ("adapter", "adapter"),
    ):
        case = f"{before}>{after}"
        for change in range(MOST):
            place = root / case / f"{change}"
            shutil.copytree(sources[before, OLD], place)
            shutil.copytree(sources[after, NEW], place / ".weights")

            def killed(change: int = change, place: Path = place) -> None:
                die_before(change)
                bring_in(place)

            ended = forked(killed)
            say(case, change, ended, place, by_peft if before == "adapter" else by_transformers)
            shutil.rmtree(place)
            if ended != -9:
                break


def save_twice(place: Path, change: int, model: Any) -> None:
    """Train a step, save, fill with NEW, and die in the second save."""
    import hpczero
    from hpczero.checkpoint.foreign import streaming
    from hpczero.checkpoint.foreign.safe_file import divided
    from tests.hf.trainer.runs import trainer_over_mpi

    vars(streaming)["divided"] = lambda sizes, most: divided(sizes, 12_000)
    trainer = trainer_over_mpi(place, 6, model, stage=3, max_steps=1, eval_strategy="no")
    trainer.train()
    trainer.save_model()
    with torch.no_grad(), hpczero.gathered(trainer.model, modifier_rank=0):
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter.fill_(NEW)
    trainer.model.config.bos_token_id = int(NEW)
    if hasattr(trainer.model, "peft_config"):
        trainer.model.peft_config["default"].lora_alpha = int(NEW)
    die_before(change)
    trainer.save_model()


def of_trainer(root: Path, what: str, changes: list[int]) -> None:
    """``save_model`` of a trainer."""
    import transformers.trainer  # noqa: F401  (once for all of them)

    make, load = (filled, by_transformers) if what == "trainer" else (adapted, by_peft)
    ended = {}
    for change in changes:
        place = root / f"{what}-{change}"

        def killed(change: int = change, place: Path = place) -> None:
            torch.set_num_threads(1)
            save_twice(place, change, make(OLD))

        ended[change] = forked(killed)
    for change, code in ended.items():
        say(what, change, code, root / f"{what}-{change}", load)


if __name__ == "__main__":
    torch.set_num_threads(1)
    kind, where, *numbers = sys.argv[1:]
    if kind == "files":
        files(Path(where))
    else:
        of_trainer(Path(where), kind, [int(number) for number in numbers])
