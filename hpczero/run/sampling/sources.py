"""Which weights a path means that a user gave to sample from: the final ones of a run, or those in a checkpoint.

Owns: the choice, and that all ranks have the same. Must not know: how either is read, what is done with them.

    runs/mine                           its final weights, or its newest sound checkpoint where that is newer
    runs/mine/checkpoints               the newest sound one
    runs/mine/checkpoints/aside-...     as runs/mine: final weights that were set aside lie there, too
    .../step-000000500, a .safetensors  these

Nothing is written and no lock is taken, so a run may be at work there. If it deletes what was chosen, the newest
weights of that moment are chosen. What a rank has open stays readable.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Collection
from pathlib import Path

from hpczero.checkpoint.disk.folder import Folder, is_checkpoint
from hpczero.checkpoint.disk.lines import step_of
from hpczero.checkpoint.places import CHECKPOINTS, GIVE, folder_at, what_is_there
from hpczero.errors import CheckpointError, CheckpointMismatch, ConfigError, CorruptCheckpoint
from hpczero.files.regular import is_there, kind_of, reason
from hpczero.job.topology import Topology
from hpczero.run.results.weights import WEIGHTS_FILE, Weights, WeightSource, step_of_weights
from hpczero.run.sampling.checkpoint_weights import CheckpointWeights, check_token_file

logger = logging.getLogger("hpczero.weights")


def open_source(path: Path, topology: Topology, *, token_file: Path | None = None) -> WeightSource:
    """The newest sound weights that ``path`` means, open on every rank. Collective over topology.world.

    Args:
        path: of a run, a folder of checkpoints, a checkpoint or a weights file.
        topology: rank 0 chooses; all ranks check the values, each a part.
        token_file: the token file that the run was trained on; only checkpoints of earlier versions need it.

    Raises:
        ConfigError: there are none, their tokenizer is unknown, or ``token_file`` has another one.
        CheckpointError: none are sound; the message says what is wrong with the newest.
        CheckpointMismatch: they are not of a GPT of hpczero.train, or a later version wrote them.
    """
    tried: list[str] = []
    failed: list[str] = []
    while True:
        text = ""
        with topology.agreed("look for weights"):
            if topology.is_root:
                text = json.dumps(_next(path, tried, failed))
        chosen, asked_for = json.loads(topology.broadcast_text(text))
        if chosen is None:
            break
        tried.append(chosen)
        try:
            source = _opened(Path(chosen), topology, asked_for=asked_for, token_file=token_file)
        except CheckpointMismatch:
            raise
        except CheckpointError as error:
            if asked_for:
                raise
            if topology.is_root:
                _tell(Path(chosen), error)
            failed.append(str(error))
            continue
        if failed and topology.is_root:
            logger.warning("sampling from the older %s", chosen)
        return source
    older = f"; {len(failed) - 1} older ones are not sound either" if failed[1:] else ""
    agreed = CorruptCheckpoint(f"{failed[0]}{older}. Restore one from a copy")
    agreed.agreed = True
    raise agreed


def _tell(path: Path, error: CheckpointError) -> None:
    if os.path.lexists(path):
        logger.warning("%s", error)
    else:
        logger.warning("%s: was deleted meanwhile, as a run does with its older ones", path)


def _next(path: Path, tried: Collection[str], failed: Collection[str]) -> tuple[str | None, bool]:
    """What to try next, and whether its own path was asked for. Not collective: rank 0 calls it.

    Raises:
        ConfigError: nothing is there, and nothing was.
    """
    if is_checkpoint(path) or _kind(path) == "a file":
        return str(path), True
    found = [place for place in map(str, _candidates(path)) if place not in tried]
    if not found and not failed:
        save = ""
        if _kind(path / CHECKPOINTS) == "a directory":
            save = f". A run has some from its first save on; `touch {path / 'SAVE'}` has a running one save now"
        raise ConfigError(
            f"{path}: no weights there, final ones or a checkpoint: {what_is_there(path)}; {GIVE}, or a safetensors "
            f"file of hpczero.train{save}"
        )
    return (found[0] if found else None), False


def _candidates(path: Path) -> list[Path]:
    """Final weights and checkpoints that ``path`` may mean, best first. At one step the final weights come first."""
    if _kind(path) != "a directory":
        return []
    found = [
        (float(step_of(entry.name) or 0), entry) for entry in Folder(folder_at(path)).candidates()
    ]
    weights = path / WEIGHTS_FILE
    try:
        if is_there(weights):
            step = step_of_weights(weights)
            # Of damaged ones nobody knows; they are named first.
            found.insert(0, (math.inf if step is None else step, weights))
    except OSError as error:
        raise _unreadable(weights, error) from error
    return [entry for _, entry in sorted(found, key=lambda pair: -pair[0])]  # stable


def _opened(
    path: Path, topology: Topology, *, asked_for: bool, token_file: Path | None
) -> WeightSource:
    """``path``, open on every rank and checked. Collective over topology.world. Every rank raises the same."""
    source: WeightSource | None = None
    try:
        with topology.agreed("open the weights"):
            if is_checkpoint(path):
                source = CheckpointWeights(path, asked_for=asked_for, token_file=token_file)
            elif step_of(path.name) is not None:
                raise CorruptCheckpoint(f"{path}: has neither manifest nor data")
            else:
                source = Weights(path)
                if token_file is not None:
                    check_token_file(path, source.tokenizer.to_json(), token_file)
        # Of one path: a save of the same step may have come in between, and nodes may have folders of their own.
        mine = source.fingerprint if source is not None else ""
        first = topology.broadcast_text(mine)
        with topology.agreed("compare the weights with those of rank 0"):
            if mine != first:
                raise CorruptCheckpoint(
                    f"{path}: is not the same on all ranks; bring it to every node"
                )
        with topology.agreed("hold the weights against their digests"):
            assert source is not None, "agreed above"
            source.check(topology.rank, topology.size)
            return source
    except BaseException:
        if source is not None:
            source.close()
        raise
    raise AssertionError("not reached")


def _kind(path: Path) -> str:
    try:
        return kind_of(path)
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{path}: cannot be looked at ({reason(error)}); check the path and its permissions"
    )
