"""Text from a trained model: which weights, and how tokens are drawn."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import hpczero
from hpczero.adapters.gpt import GPTAdapter
from hpczero.checkpoint.disk.folder import (
    CHECKPOINTS,
    GIVE,
    Folder,
    folder_at,
    is_checkpoint,
    kind_at,
    misnamed,
    what_is_there,
)
from hpczero.checkpoint.disk.format import MASTER
from hpczero.checkpoint.disk.json_keys import extra_of
from hpczero.checkpoint.disk.lines import step_of
from hpczero.checkpoint.disk.stored import Stored
from hpczero.data import Tokenizer, same_tokenizer, tokenizer_name
from hpczero.data.tokenize import from_json
from hpczero.data.tokens import TokenFile
from hpczero.errors import (
    CheckpointError,
    CheckpointMismatch,
    ConfigError,
    CorruptCheckpoint,
    DataError,
    launcher_rank,
)
from hpczero.files.regular import shown
from hpczero.job.launch import start_topology, use_own_cores
from hpczero.job.messages import hand_out
from hpczero.job.topology import Topology
from hpczero.models import GPTConfig, generate
from hpczero.models.config import parameter_shapes
from hpczero.options.config import LayoutOptions
from hpczero.parallel.pipeline.runner import Pipeline
from hpczero.parallel.tensor import close
from hpczero.plan.degrees import check_model, mesh_on_nodes
from hpczero.run.results.weights import WEIGHTS_FILE, Weights, check_writes_text, step_of_weights
from hpczero.run.starting.building import divide
from hpczero.run.starting.resume import DATA, MODEL, TOKENIZER, data_of

# Which weights a path means that a user gave to sample from: the final ones of a run, or those in a checkpoint.
#
#     runs/mine                           its final weights, or its newest sound checkpoint where that is newer
#     runs/mine/checkpoints               the newest sound one
#     runs/mine/checkpoints/aside-...     as runs/mine: final weights that were set aside lie there, too
#     .../step-000000500, a .safetensors  these
#
# Nothing is written and no lock is taken, so a run may be at work there. If it deletes what was chosen, the newest
# weights of that moment are chosen. What a rank has open stays readable.

# The weights in a checkpoint of the training command, tensor by tensor, each checked against its digests.
#
# A checkpoint states its tokenizer, so it may be set aside, copied or loaded by another run, and its tokens are never
# read with another tokenizer. A checkpoint of an earlier version does not. The token file must then be named, and is
# compared with what the checkpoint says of the run's data.

logger = logging.getLogger("hpczero.weights")


class CheckpointWeights:
    """One checkpoint, read as ``Weights``. Once it is open, it stays readable even if the checkpoint is deleted."""

    def __init__(self, path: Path, *, asked_for: bool, token_file: Path | None = None) -> None:
        """Open a checkpoint; no values are read yet.

        ``asked_for``: by its path. It need then not be of the step that its name states.

        Raises:
            CorruptCheckpoint: its manifest or size is not what was written, or its name states another step.
            CheckpointMismatch: it is not of a GPT of hpczero.train, or a later version wrote it.
            ConfigError: its tokenizer is not known, or ``token_file`` is of another one.
            DataError: ``token_file`` cannot be read.
        """
        self.path = path
        self._stored = Stored(path)
        try:
            manifest = self._stored.manifest
            wrong = misnamed(path, manifest)
            if wrong and not asked_for:
                raise CorruptCheckpoint(wrong)
            self.step = manifest.step
            self.fingerprint = hashlib.sha256(manifest.to_json().encode()).hexdigest()
            self._extra = extra_of(manifest.meta)
            self.model = self._model()
            self._rows = manifest.table.named()
            self._check_shapes()
            self.tokenizer = self._tokenizer(token_file)
        except BaseException:
            self._stored.close()
            raise

    def _model(self) -> GPTConfig:
        said = self._extra.get(MODEL)
        check_writes_text(self.path, said)
        if not isinstance(said, dict):
            raise CheckpointMismatch(
                f"{self.path}: does not say which GPT it is of: it was not saved by hpczero.train, and cannot be "
                "sampled from; `python -m hpczero.checkpoint export` gives its weights"
            )
        try:
            return GPTConfig(**said)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise CheckpointMismatch(
                f"{self.path}: says that its model is {shown(said)}, which is no GPT of this version ({error})"
            ) from error

    def _check_shapes(self) -> None:
        owners = self._stored.manifest.table.owners
        try:
            if self.model.layers > len(owners):
                raise ValueError(f"{self.model.layers} layers in {len(owners)} parameters")
            expected = sorted(parameter_shapes(self.model))
        except (TypeError, ValueError, ArithmeticError) as error:
            raise CheckpointMismatch(f"{self.path}: sizes that are no GPT's: {error}") from error
        found = sorted((row.name, row.shape) for row in owners)
        if found == expected:
            return
        names = sorted({name for name, _ in set(found) ^ set(expected)})
        raise CheckpointMismatch(
            f"{self.path}: its parameters are not those of the GPT that it says it is of: {', '.join(names[:5])}"
            f"{f' and {len(names) - 5} more' if names[5:] else ''} are missing, foreign or of another shape"
        )

    def _tokenizer(self, token_file: Path | None) -> Tokenizer:
        said = self._extra.get(TOKENIZER)
        if said is None:
            found = self._from(token_file)
        elif isinstance(said, str):
            try:
                found = from_json(said)
            except DataError as error:
                raise CheckpointMismatch(f"{self.path}: {error}; upgrade hpczero") from error
            if token_file is not None:
                check_token_file(self.path, said, token_file)
        else:
            raise CheckpointMismatch(f"{self.path}: its tokenizer is {shown(said)}, expected text")
        if found.vocab_size != self.model.vocab_size:
            raise CheckpointMismatch(
                f"{self.path}: its tokenizer has {found.vocab_size:,} ids and its model {self.model.vocab_size:,}; "
                "they do not belong together"
            )
        return found

    def _from(self, token_file: Path | None) -> Tokenizer:
        """The tokenizer of ``token_file``. Raises ConfigError if the checkpoint was not trained on that file."""
        if token_file is None:
            raise ConfigError(
                f"{self.path}: has no tokenizer in it, as those of earlier versions and of other programs' weights; "
                "name the token file (.h5) that it was trained on with --token-file FILE (a run's config.toml says in "
                "[data] which that is)"
            )
        with TokenFile.open(token_file) as tokens:
            now, tokenizer = data_of(tokens), tokens.tokenizer
        trained_on = self._extra.get(DATA)
        if trained_on is None:
            if launcher_rank() == 0:
                logger.warning(
                    "%s: says neither its tokenizer nor its data, so nobody can tell whether that of %s is the right "
                    "one: that it has as many ids is all that is checked",
                    self.path,
                    token_file,
                )
        elif trained_on != now:
            raise ConfigError(
                f"{token_file}: is not what {self.path} was trained on: that was {shown(trained_on)}, and this is "
                f"{now}; its tokens would be read with a wrong tokenizer"
            )
        return tokenizer

    def check(self, part: int, parts: int) -> None:
        """Check one of ``parts`` parts of the values against their digests."""
        dataset = self._stored.manifest.dataset(MASTER)
        assert dataset is not None, "the content was checked"
        for index in dataset.slabs_of(part, parts):
            slab = dataset.slab(index)
            for _ in self._stored.read(MASTER, slab.start, slab.stop):
                pass

    def read_into(self, name: str, tensor: Tensor) -> None:
        """Fill one whole parameter in place, checked."""
        row = self._rows.get(name)
        if row is None or row.shape != tuple(tensor.shape):
            found = "not in it" if row is None else str(row.shape)
            raise CheckpointMismatch(
                f"{self.path}: parameter {name!r} is {found}, expected {tuple(tensor.shape)}"
            )
        flat, begin = tensor.view(-1), 0
        for piece in self._stored.read(MASTER, row.offset, row.offset + row.numel):
            flat[begin : begin + len(piece)].copy_(torch.from_numpy(piece))
            begin += len(piece)

    def close(self) -> None:
        """Close the checkpoint; nothing can be read any more."""
        self._stored.close()


WeightSource = Weights | CheckpointWeights


def check_token_file(path: Path, tokenizer: str, token_file: Path) -> None:
    """Refuse a token file whose tokenizer is not that of the weights at ``path``.

    Raises:
        ConfigError: the message names both.
        DataError: the file cannot be read.
    """
    with TokenFile.open(token_file) as tokens:
        other = tokens.tokenizer.to_json()
    if not same_tokenizer(tokenizer, other):
        raise ConfigError(
            f"{token_file}: has another tokenizer ({tokenizer_name(other)}) than {path} ({tokenizer_name(tokenizer)}), "
            "which says its own; leave --token-file out"
        )


def open_source(path: Path, topology: Topology, *, token_file: Path | None = None) -> WeightSource:
    """The newest sound weights that ``path`` means, open on every rank. Collective over topology.world.

    Rank 0 chooses. All ranks check the values, each rank a part. Only checkpoints of earlier versions need
    ``token_file``, which the run was trained on.

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
    raise CorruptCheckpoint(f"{failed[0]}{older}. Restore one from a copy").on_all_ranks()


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
    if is_checkpoint(path) or kind_at(path) == "a file":
        return str(path), True
    found = [place for place in map(str, _candidates(path)) if place not in tried]
    if not found and not failed:
        save = ""
        if kind_at(path / CHECKPOINTS) == "a directory":
            save = f". A run has some from its first save on; `touch {path / 'SAVE'}` has a running one save now"
        raise ConfigError(
            f"{path}: no weights there, final ones or a checkpoint: {what_is_there(path)}; {GIVE}, or a safetensors "
            f"file of hpczero.train{save}"
        )
    return (found[0] if found else None), False


def _candidates(path: Path) -> list[Path]:
    """Final weights and checkpoints that ``path`` may mean, best first. At one step the final weights come first."""
    if kind_at(path) != "a directory":
        return []
    found = [
        (float(step_of(entry.name) or 0), entry) for entry in Folder(folder_at(path)).candidates()
    ]
    weights = path / WEIGHTS_FILE
    if kind_at(weights) not in ("", "a link to nothing"):
        step = step_of_weights(weights)
        # Of damaged ones nobody knows; they are named first.
        found.insert(0, (math.inf if step is None else step, weights))
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
        assert source is not None, "agreed above"
        unlike = CorruptCheckpoint(f"{path}: is not the same on all ranks; bring it to every node")
        topology.same(source.fingerprint, "compare the weights with those of rank 0", unlike)
        with topology.agreed("hold the weights against their digests"):
            source.check(topology.rank, topology.size)
            return source
    except BaseException:
        if source is not None:
            source.close()
        raise
    raise AssertionError("not reached")


def sample(
    path: str,
    *,
    prompt: str,
    num_tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int,
    stage: int,
    token_file: str = "",
    parallel: LayoutOptions | None = None,
) -> None:
    """Continue the prompt on all ranks together; rank 0 writes the text. Collective over MPI's world.

    Every rank runs the same forwards and draws the same random numbers, so all choose the same tokens. Only the weights
    are sharded, or divided. Tensor ranks add up parts of products, so logits may differ in their last bits from those
    of one rank; the text differs where two tokens are that close.

    The arguments are the options of ``hpczero.sample``. ``top_k`` of None chooses among all tokens.

    Raises:
        ConfigError: there are no such weights, their tokenizer is unknown, or the ranks or the model do not suit the
            degrees.
        CheckpointError: the weights are damaged; on every rank.
    """
    parallel = parallel or LayoutOptions()
    topology = start_topology(None, partial(mesh_on_nodes, parallel))
    use_own_cores(topology)
    weights = open_source(Path(path), topology, token_file=Path(token_file) if token_file else None)
    tokenizer = weights.tokenizer
    if topology.is_root:  # not on stdout, which is the text's
        sys.stderr.write(f"weights of step {weights.step:,}: {weights.path}\n")
        sys.stderr.flush()
    with topology.agreed("read the prompt"):
        # surrogateescape: the very bytes of the command line, were they UTF-8 or not
        ids = tokenizer.encode(prompt.encode(errors="surrogateescape"))
        prompt_T = torch.from_numpy(ids if len(ids) else np.array([tokenizer.separator]))
    with topology.agreed("hold the model against the degrees"):
        check_model(parallel, weights.model)
    adapter = GPTAdapter(weights.model)
    with torch.device("meta"):
        model = adapter.build()
    divide(parallel, adapter, model, topology)
    hpczero.zeroify(model, None, stage=stage, topology=topology, initialize=weights.read_into)
    weights.close()
    model.eval()
    tokens = generate(
        _logits_of(model, topology, weights.model.vocab_size),
        prompt_T,
        num_tokens=num_tokens,
        context=weights.model.context,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
    )
    if topology.is_root:
        text = tokenizer.decode(tokens.tolist()).decode(errors="replace")
        sys.stdout.buffer.write(f"{text}\n".encode())
        sys.stdout.flush()
    hpczero.release(model)
    close(model)
    topology.free()


def _logits_of(model: nn.Module, topology: Topology, vocab_size: int) -> Callable[[Tensor], Tensor]:
    """The model's logits on every rank, whichever rank has computed them; of a pipeline those of the last token."""
    stages = topology.pipeline
    if stages.size == 1:
        return model
    pipeline = Pipeline(model, micro_batches=1)

    def logits_of(tokens_BT: Tensor) -> Tensor:
        last = stages.size - 1
        found = pipeline.outputs([tokens_BT])
        logits_V = torch.empty(vocab_size, dtype=torch.float32, device="cpu")
        if found is not None:
            logits_V = found[0][0, -1].float().cpu()
        hand_out(stages, logits_V.numpy(), root=last)
        return logits_V[None, None]

    return logits_of
