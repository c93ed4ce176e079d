"""Where a run begins: anew, or from a checkpoint.

--resume.from auto   this run's newest sound checkpoint; of a finished run, one that has its results, only if more
                     steps are asked for
              never  from the start
              PATH   that checkpoint, or the newest sound one in that folder, also of another run
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpczero.checkpoint.disk.folder import GIVE, folder_at, holds_imports_alone, is_checkpoint
from hpczero.data import same_tokenizer, tokenizer_name
from hpczero.errors import CheckpointError, ConfigError
from hpczero.files.regular import WHY, Explained, is_there, kind_of, shown
from hpczero.options.config import DEFAULT_RUN, ModelOptions, RunConfig
from hpczero.options.reading import load_toml
from hpczero.plan.degrees import divisors
from hpczero.plan.sizing import Batch
from hpczero.run.results.folder import RunFolder

if TYPE_CHECKING:
    from hpczero.checkpoint import Loaded
    from hpczero.data import TokenFile
    from hpczero.data.sources import Sources
    from hpczero.job.topology import Topology

logger = logging.getLogger("hpczero.resume")

# A change of these is another model, other data, or another order of them.
FIXED = {
    "run": ("seed",),
    "model": (
        "preset",
        "layers",
        "hidden",
        "heads",
        "context",
        "positions",
        "factory",
        "arguments",
    ),
    "data": ("documents",),
    "train": ("global_batch",),
}
# Compared each in its own way. Of what an earlier version did not save nothing is known.
MODEL, TOKENIZER = "model", "tokenizer"
DATA = "data"
COMPUTED_ON = "computed_on"  # of an exact run; see zero/exact.py
# Of a checkpoint's model: another one gives the same numbers.
NOT_OF_THE_MODEL = ("checkpoint_activations",)
# Of imported weights: how they were trained does not bind who trains them on.
NOT_OF_THE_WEIGHTS = (*NOT_OF_THE_MODEL, "dropout")
MOST_RANKS = 8  # numbers of them in a message
# A different one of these gives different losses from here on, which may be what is wanted.
TELLING = {
    "run": ("exact",),
    "train": (
        "steps",
        "learning_rate",
        "min_learning_rate",
        "warmup",
        "schedule",
        "decay_steps",
        "weight_decay",
        "betas",
        "clip",
    ),
    "parallel": ("precision", "reduce", "gather"),
    "local": ("steps", "groups"),
}


def choose(config: RunConfig, folder: RunFolder, *, in_memory: bool = False) -> Path | None:
    """The checkpoint to load, or None. Not collective: rank 0 calls it.

    Args:
        config: has the batch spelled out.
        folder: of the run.
        in_memory: whether nodes hold copies of this run, which count as one of its checkpoints.

    Raises:
        ConfigError: this run has checkpoints made with other or unknown options, or PATH does not exist.
    """
    source = config.resume.from_
    if source == "never" or (source == "auto" and config.run.overwrite):
        return None
    if source != "auto":
        return _checkpoints_of(source)
    trying_out = config.run.name == DEFAULT_RUN  # this name: what cannot be gone on with makes room
    if not folder.config.exists():
        if not folder.holds_other_results and holds_imports_alone(folder.checkpoints):
            return folder.checkpoints
        if not folder.holds_results or trying_out:
            return None
        raise ConfigError(
            f"{folder.path}: has checkpoints, a model or metrics, and no config.toml, so nobody knows whose they are. "
            f"{_way_out(folder)}"
        )
    try:
        earlier = load_toml(folder.config, RunConfig)
    except ConfigError as error:
        if trying_out:
            return None
        raise ConfigError(f"{error}. {_way_out(folder)}") from error
    # Elsewhere is looked at only where that is needed: it may be gone, or on a file system that is not there today.
    saved = in_memory or folder.has_checkpoints
    if not saved and (folder.weights.exists() or not _begun_elsewhere(earlier)):
        return None
    changed = differences(earlier, config, FIXED)
    # The shape of a leaf is a part of the sum.
    if "off" not in (earlier.run.exact, config.run.exact):
        changed += differences(earlier, config, {"train": ("micro_batch",)})
    more = config.train.steps > earlier.train.steps or _has_more_patience(config, earlier)
    if trying_out and (changed or (folder.weights.exists() and not more)):
        return None
    if changed:
        raise ConfigError(
            f"{folder.path}: has checkpoints of a run with other options ({'; '.join(changed)}); give the same ones to "
            "go on, choose another --run.name, or start anew with --run.overwrite true"
        )
    if folder.weights.exists() and not more:
        raise ConfigError(
            f"{folder.path}: holds a finished run of {earlier.train.steps} steps; ask for more --train.steps to go on "
            "(for more --evaluation.patience, or 0, if it was that which ended the run), choose another --run.name, or "
            "replace it with --run.overwrite true"
        )
    if not saved:  # it was lost before its first save, and began elsewhere
        return _checkpoints_of(earlier.resume.from_)
    return folder.checkpoints


def _has_more_patience(now: RunConfig, earlier: RunConfig) -> bool:
    most, before = now.evaluation.patience, earlier.evaluation.patience
    return before > 0 and (most == 0 or most > before)


def chosen(
    config: RunConfig, folder: RunFolder, topology: Topology, *, in_memory: bool = False
) -> str:
    """What ``choose`` says on rank 0, on every rank; empty where the run begins anew. Collective over world.

    Raises:
        ConfigError: as ``choose``; on every rank.
    """
    source = ""
    with topology.agreed("choose where to begin"):
        if topology.is_root:
            source = str(choose(config, folder, in_memory=in_memory) or "")
    return topology.broadcast_text(source)


def check_ranks(config: RunConfig, folder: RunFolder, ranks: int) -> None:
    """Refuse ranks that cannot share the global batch of the run in ``folder``. Not collective: rank 0 calls it.

    The message does not advise another batch, because the run would not go on with it.

    Raises:
        ConfigError: the message has the numbers of ranks that can.
    """
    whole = _global_batch_of(config, folder)
    if whole is None:
        return
    with suppress(ConfigError):
        now = Batch.resolve(config.train, ranks, exact=config.run.exact != "off").global_batch
        if now == whole or config.run.name == DEFAULT_RUN:  # that one makes room for another batch
            return
    exact = config.run.exact != "off"
    counts = range(1, whole + 1) if exact else divisors(whole)
    fitting = [count for count in counts if _spreads(config, whole, count)]
    if ranks in fitting:
        return
    near = sorted(sorted(fitting, key=lambda count: abs(count - ranks))[:MOST_RANKS])
    way = "goes on with the train.micro_batch and train.accumulation it had"
    if near:
        *most, last = map(str, near)
        way = (
            f"goes on with {', '.join(most)} or {last} ranks"
            if most
            else f"goes on with {last} rank(s)"
        )
    raise ConfigError(
        f"train.global_batch: the run in {folder.path} has a global batch of {whole}, which {ranks} rank(s) cannot "
        f"share; it {way}. For another batch choose another --run.name"
    )


def _global_batch_of(config: RunConfig, folder: RunFolder) -> int | None:
    """Global batch of the run that ``config`` may go on with; None if it goes on with none."""
    if config.resume.from_ != "auto" or config.run.overwrite or not folder.has_checkpoints:
        return None
    try:
        whole = load_toml(folder.config, RunConfig).train.global_batch
    except ConfigError:  # whoever chooses where to begin says so
        return None
    other = config.train.global_batch not in (None, whole)
    return None if other and config.run.name == DEFAULT_RUN else whole


def _spreads(config: RunConfig, whole: int, ranks: int) -> bool:
    with suppress(ConfigError):
        train = dataclasses.replace(config.train, global_batch=whole)
        Batch.resolve(train, ranks, exact=config.run.exact != "off")
        return True
    return False


def _begun_elsewhere(earlier: RunConfig) -> bool:
    """Whether a run began at a checkpoint that exists. Raises ConfigError if the system does not say."""
    source = earlier.resume.from_
    return source not in ("auto", "never") and bool(_kind_of(Path(source)))


def _checkpoints_of(source: str) -> Path:
    path = Path(source)
    if not _kind_of(path):
        raise ConfigError(f"resume.from: {source} does not exist; {GIVE}; or auto or never")
    return path if is_checkpoint(path) else folder_at(path)


def _kind_of(path: Path) -> str:
    """What is at a path; empty if nothing is."""
    with Explained(
        ConfigError,
        f"resume.from: {path} cannot be looked at ({WHY}); check that its file system is mounted and its "
        "permissions, or give another checkpoint, a folder of them, auto or never",
    ):
        return kind_of(path) if is_there(path) else ""


def _way_out(folder: RunFolder) -> str:
    return (
        f"Begin at them with --resume.from {folder.checkpoints} and another --run.name, with the options of that run; "
        "or put the right config.toml back, choose another --run.name, or delete them with --run.overwrite true"
    )


def began_at(source: Path, folder: RunFolder) -> bool:
    """Whether the run in ``folder`` began at ``source`` and has saved nothing since. Not collective."""
    with suppress(ConfigError, CheckpointError):
        if folder.config.exists() and not folder.has_checkpoints:
            earlier = load_toml(folder.config, RunConfig).resume.from_
            return earlier not in ("auto", "never") and _checkpoints_of(earlier) == source
    return False


def next_command(config: RunConfig, *, in_series: bool) -> str:
    """The command that goes on with a run that was stopped, for people. In a series the next start needs no command."""
    changes = []
    if config.run.overwrite:
        changes.append("--run.overwrite false")
    if config.resume.from_ != "auto":
        changes.append("--resume.from auto")
    if in_series or not changes:
        return "the same command goes on from there"
    return f"the same command with {' and '.join(changes)} goes on from there"


def differences(
    earlier: RunConfig, now: RunConfig, sections: dict[str, tuple[str, ...]]
) -> list[str]:
    """Options of ``sections`` that differ, as ``train.clip was 1.0 and is 0.5``."""
    found = []
    for section, names in sections.items():
        for name in names:
            before = getattr(getattr(earlier, section), name)
            after = getattr(getattr(now, section), name)
            if before != after:
                found.append(f"{section}.{name} was {before} and is {after}")
    return found


def data_of(tokens: TokenFile | Sources) -> str:
    """Data of a run, in words that are equal for token files of which a run sees the same samples."""
    return f"{tokens.source_sha256} {len(tokens.train)} tokens of {tokens.vocab_size}"


def identity(config: RunConfig, data: Mapping[str, Any], card: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint of the training command states beside the model, for ``check`` and for readers.

    ``config`` has the batch spelled out. ``data`` has ``DATA``, and of a text ``TOKENIZER``. ``card`` is of
    ``model_card``.
    """
    return {
        DATA: data[DATA],
        "global_batch": config.train.global_batch,
        "seed": config.run.seed,
        MODEL: dict(card),
        **{name: value for name, value in data.items() if name != DATA},
    }


def model_card(options: ModelOptions, card: Mapping[str, Any]) -> dict[str, Any]:
    """What checkpoints and weights state of the model: the card of its adapter, and the factory it came from.

    As a checkpoint gives it back: tuples are lists, for instance.

    Raises:
        ConfigError: the card is no mapping, or has what JSON cannot hold.
    """
    if options.factory is None:
        return dict(card)
    try:
        stated: dict[str, Any] = json.loads(json.dumps(dict(card), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"model.factory: card() of {options.factory} gave what no checkpoint can hold ({error}), expected a "
            "mapping of numbers, texts, lists and mappings of them"
        ) from error
    return {"factory": options.factory, "arguments": options.arguments or "{}", **stated}


def check(found: Loaded, identity: Mapping[str, Any], steps: int, *, own: bool) -> None:
    """Compare a loaded checkpoint with this run. The same on every rank; not collective.

    Args:
        found: the checkpoint.
        identity: of this run.
        steps: number of steps of this run.
        own: whether the checkpoint is this run's. One with all steps is then allowed: the run was lost before it had
            written its results, which are still to be written.

    Raises:
        ConfigError: the model is another, which shapes do not always tell. Or the data, tokenizer, batch or seed is
            another, so the next sample would not be the next. Or no step is left to do. Imported weights need not state
            their data, because a run only begins with them.
    """
    skipped = NOT_OF_THE_WEIGHTS if found.imported else NOT_OF_THE_MODEL
    changed = _model_differences(found.extra.get(MODEL), identity.get(MODEL), skipped)
    if changed:
        raise ConfigError(
            f"{found.path}: belongs to a run of another model: {'; '.join(changed)}. Give the options of that run to "
            "go on from it, or start anew with another --run.name"
        )
    problems = [
        f"{name} was {found.extra.get(name)!r} and is {now!r}"
        for name, now in identity.items()
        if name not in (MODEL, TOKENIZER, COMPUTED_ON)
        and not (found.imported and name not in found.extra)
        and found.extra.get(name) != now
    ]
    earlier, tokenizer = found.extra.get(TOKENIZER), identity.get(TOKENIZER)
    if earlier is not None and tokenizer is not None and not same_tokenizer(earlier, tokenizer):
        problems.append(
            f"tokenizer was {tokenizer_name(earlier)} and is {tokenizer_name(tokenizer)}"
        )
    if problems:
        raise ConfigError(
            f"{found.path}: belongs to a run that saw other samples: {'; '.join(problems)}. Use the data and options "
            "of that run, or start anew with another --run.name"
        )
    before, now = found.extra.get(COMPUTED_ON), identity.get(COMPUTED_ON)
    if now is not None and before != now:
        logger.warning(
            "exact: the steps before were computed on %s, and those that follow on %s, so their last bits may be other "
            "ones than a run on either would have",
            before or "other terms (run.exact was off)",
            now,
        )
    if found.step > steps or (found.step == steps and (found.imported or not own)):
        raise ConfigError(
            f"{found.path}: has {found.step} steps behind it, and train.steps is {steps}; ask for more"
        )


def _model_differences(earlier: object, now: object, skipped: tuple[str, ...]) -> list[str]:
    """Differences of what two checkpoints state of their models. What one does not state is not compared."""
    if not isinstance(earlier, Mapping) or not isinstance(now, Mapping):
        return []  # weights of another program say nothing
    return [
        f"model.{name} was {shown(earlier[name])} and is {shown(value)}"
        for name, value in now.items()
        if name in earlier and name not in skipped and earlier[name] != value
    ]


def tell_changes(folder: RunFolder, config: RunConfig) -> None:
    """Warn of options that change the losses to come. Not collective: rank 0 calls it."""
    if not folder.config.exists():
        return
    try:
        earlier = load_toml(folder.config, RunConfig)
    except ConfigError as error:
        logger.warning("the options of before are not known: %s", error)
        return
    for change in differences(earlier, config, TELLING):
        logger.warning("going on with another option: %s", change)
