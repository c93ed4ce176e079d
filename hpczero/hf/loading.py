"""load: a model of a Hugging Face folder, built without weights, and its weights to be read into shards.

folder -> config -> model on meta -> names compared -> buffers -> (model, weights) -> zeroify(initialize=weights)
"""

from __future__ import annotations

import copy
import logging
import zlib
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hpczero.checkpoint.disk.format import some
from hpczero.checkpoint.foreign.weight_files import cast
from hpczero.errors import CheckpointMismatch, ConfigError, PlanError
from hpczero.hf import building
from hpczero.hf.building import ModelChoice, config_and_class, of_folder
from hpczero.hf.files import Matched, WeightFolder, match
from hpczero.hf.hub import Hub, find, model_kind
from hpczero.hf.weights import FolderWeights
from hpczero.job.group import unlike
from hpczero.job.messages import hand_out
from hpczero.job.topology import Topology
from hpczero.zero.buffers import persistent_buffers

logger = logging.getLogger("hpczero.hf")


def load(
    name: str | Path,
    *,
    topology: Topology | None = None,
    model_class: Any = None,
    missing: Literal["draw", "refuse"] = "draw",
    ignore_mismatched_sizes: bool = False,
    seed: int = 0,
    hub: Hub | None = None,
    trust_remote_code: bool = False,
    **changes: Any,
) -> tuple[Any, FolderWeights]:
    """A model of transformers without weights, and the weights for ``zeroify``. Collective over the topology's world.

    ``model, weights = load(folder)``, an optimizer over ``model.parameters()``, then ``zeroify(model, optimizer,
    initialize=weights)``: each rank reads the elements of its own shard, and masters are fp32 whatever the files hold.
    The model is in evaluation mode, as ``from_pretrained`` leaves it.

    Args:
        name: a folder with config.json and safetensors files, which every rank sees, or a model of the hub.
        topology: the ranks; None takes MPI's world, for this call alone.
        model_class: of transformers, such as ``AutoModelForSequenceClassification``; None takes the one that
            config.json names.
        missing: ``draw`` gives parameters that no file has the values that the model's own initialisation draws, by
            (seed, name), the same for every number of ranks; rank 0 names them. ``refuse`` raises.
        ignore_mismatched_sizes: whether a parameter of which the files have another shape counts as missing, such as a
            head for another number of classes; else that is refused.
        seed: of what is drawn.
        hub: how a model of the hub is found.
        trust_remote_code: whether Python files of the folder are run, where config.json names classes in them.
        changes: of the configuration, such as ``num_labels=3``, and ``attn_implementation``.

    Returns:
        The model, parameters on the meta device in fp32, buffers with their values, and its weights.

    Raises:
        ConfigError: there is no such model, config.json cannot be used, or transformers is not installed.
        CheckpointError: a file is missing, torn or damaged.
        CheckpointMismatch: the files are of another model, differ between nodes, or lack what must be there.
        PlanError: a buffer has no values. All on every rank.
    """
    given = topology or Topology.of_world()
    try:
        path = find(name, hub or Hub(), given)
        choice = ModelChoice(model_class, changes, trust_remote_code)
        return _load(path, choice, given, missing, ignore_mismatched_sizes, seed)
    finally:
        if topology is None:
            given.free()


def _load(
    path: Path,
    choice: ModelChoice,
    topology: Topology,
    missing: str,
    ignore_mismatched_sizes: bool,
    seed: int,
) -> tuple[Any, FolderWeights]:
    if choice.trust_remote_code:
        for first in (topology.is_root, topology.local_rank == 0):
            with topology.agreed("bring the model's own code into the cache"):
                if first:
                    config_and_class(path, choice)
    with topology.agreed("build the model and compare it with its files"):
        if missing not in ("draw", "refuse"):
            raise ConfigError(f"missing: got {missing!r}, expected 'draw' or 'refuse'")
        model: Any = building.build(lambda: of_folder(path, choice), seed=seed)
        folder = WeightFolder(path)
        matched = match(model, folder.entries)
        if matched.mismatched and not ignore_mismatched_sizes:
            shown = [
                f"{n} is {a} in the files and {b} in the model"
                for n, (a, b) in matched.mismatched.items()
            ]
            raise CheckpointMismatch(
                f"{path}: weights of another model: {some(shown, '; ')}; change the configuration to what the files "
                "hold, or give ignore_mismatched_sizes=True, which draws them"
            )
        if matched.missing and missing == "refuse":
            raise CheckpointMismatch(
                f"{path}: has no {some(matched.missing)}, and missing='refuse'; bring files that have all, or draw them"
            )
        there = {owner for owner in matched.owners.values() if matched.has(owner)}
        building.check_buffers(model, filled=there)
        # A copy: the program may change the model before its values are drawn.
        draw = partial(drawn, copy.deepcopy(model), seed) if matched.missing else None
        weights = FolderWeights(folder, matched, model, draw)
    _compare_ranks(path, folder, model, seed, topology)
    with topology.agreed("check the weights against their digests"):
        folder.check(topology.rank, topology.size)
    _fill_buffers(model, folder, matched, topology)
    if topology.is_root:
        _tell(path, model, matched)
    model._weight_conversions = matched.transforms  # as from_pretrained; saving goes back by them
    return model.eval(), weights


def _compare_ranks(
    path: Path, folder: WeightFolder, model: nn.Module, seed: int, topology: Topology
) -> None:
    """Refuse ranks with other files or another model. Collective over world."""
    shapes = [f"{name} {tuple(p.shape)}" for name, p in model.named_parameters()]
    here = unlike(topology.world, [*folder.fingerprint(), *shapes, f"seed {seed}"])
    with topology.agreed("compare the model and its files with those of rank 0"):
        if here is not None:
            raise CheckpointMismatch(
                f"{path}: rank {topology.rank} has {here[0][:200]}, rank 0 has {here[1][:200]}; bring the same files "
                "to every node, and give every rank the same arguments"
            )


def _fill_buffers(
    model: nn.Module, folder: WeightFolder, matched: Matched, topology: Topology
) -> None:
    """Read persistent buffers on rank 0, and hand them out. Collective over world."""
    kept = {n: b for n, b in persistent_buffers(model).items() if matched.has(matched.owners[n])}
    with topology.agreed("read the buffers"):
        if topology.is_root:
            for name, buffer in kept.items():
                value = _buffer(model, folder, matched, matched.owners[name])
                with torch.no_grad():
                    buffer.copy_(cast(value, buffer.dtype, name))
    for buffer in kept.values():
        values = buffer.detach().clone().contiguous().reshape(-1).view(torch.uint8)
        hand_out(topology.world, values.numpy())
        with torch.no_grad():
            buffer.copy_(values.view(buffer.dtype).view(buffer.shape))


def _buffer(model: nn.Module, folder: WeightFolder, matched: Matched, owner: str) -> Tensor:
    if owner in matched.plain:
        return folder.box(matched.plain[owner][0])
    group, name = matched.converted[owner]
    found: Tensor = group.convert(model, folder.box)[name]
    return found


def _tell(path: Path, model: Any, matched: Matched) -> None:
    """Name what the files lack and what they have too much, as far as the model says that it matters."""
    report = SimpleNamespace(
        missing_keys=set(matched.missing), unexpected_keys=set(matched.unexpected)
    )
    model._adjust_missing_and_unexpected_keys(report)
    if report.missing_keys:
        logger.warning(
            "%s: has no %s of %s; drawn by the model's own initialisation: train them",
            path,
            some(sorted(report.missing_keys)),
            type(model).__name__,
        )
    if report.unexpected_keys:
        logger.warning(
            "%s: has %s, which %s has no place for; left out",
            path,
            some(sorted(report.unexpected_keys)),
            type(model).__name__,
        )


def drawn(model: nn.Module, seed: int, name: str) -> Tensor:
    """First value of one parameter: whole, fp32 on the CPU.

    Args:
        model: whose parameters are on the meta device, where initialising them does nothing.
        seed: of the value, with the name.
        name: of the parameter.

    Raises:
        PlanError: the model does not say how it is initialised.
    """
    path, _, last = name.rpartition(".")
    names = path.split(".") if path else []
    modules: list[Any] = [model.get_submodule(".".join(names[:n])) for n in range(len(names) + 1)]
    before = modules[-1]._parameters[last]
    empty = torch.full(before.shape, float("nan"), dtype=torch.float32, device="cpu")
    drawn = nn.Parameter(empty, requires_grad=False)
    modules[-1]._parameters[last] = drawn
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            while modules:  # from the inside out
                # A model inside a model initialises what is below it, itself included.
                owner = next(each for each in reversed(modules) if isinstance(each, model_kind()))
                owner._init_weights(modules.pop())
    finally:
        model.get_submodule(path)._parameters[last] = before
    if bool(drawn.isnan().any()):
        raise PlanError(
            f"parameter {name!r} is in no file, and the model's _init_weights leaves it without values; bring a "
            "file that has it, or set it up there"
        )
    return drawn.data
