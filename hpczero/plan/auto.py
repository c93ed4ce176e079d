"""``python -m hpczero.plan --auto``: the settings that train a model fastest within the memory that there is.

    mpirun -n 2 python -m hpczero.plan --auto --model gpt2-xl --global-batch 8 --folder /local/scratch
    python -m hpczero.plan --auto --model gpt-60b --global-batch 512 --machine dgx-h100 --ranks 64
    python -m hpczero.plan --auto --layouts --model gpt-60b --global-batch 512 --machine dgx-h100 --ranks 256

Without ``--machine`` all ranks of the job probe the machine that they are on, for some seconds.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import tyro

from hpczero.errors import EXIT_FAILURE, ConfigError
from hpczero.job.mesh import Mesh
from hpczero.models.config import GPTConfig
from hpczero.options.config import PlannedModel
from hpczero.options.reading import parse_command_line
from hpczero.plan.footprint import fastest_transport
from hpczero.plan.peak import PlannedRun
from hpczero.planner.choice import Choice, Freedom, Predicted, describe, lines, options_of
from hpczero.planner.search import (
    balance_on,
    describe_layout,
    options_of_layout,
    prediction_on,
    search,
    search_layouts,
)
from hpczero.predict.answer import alike, spread
from hpczero.predict.machine import load_machine
from hpczero.predict.model import StepRange

SHOWN = 8


@dataclass(frozen=True)
class AutoOptions(PlannedModel):
    """What to choose for.

    Attributes:
        global_batch: samples of a step over all ranks.
        folder: on a disk of every node, where parts of the shards may rest; left out, nothing rests on disk.
        device: where this machine computes.
        machine: a description that comes with hpczero, such as dgx-h100, or a path to one like it; left out, the
            machine that this runs on, which all ranks of the job probe.
        ranks: of --machine.
        layouts: a bare --layouts: which ranks of --machine should share what, of all layouts; nothing rests elsewhere.
        json: print one JSON object instead of lines.
    """

    global_batch: int = 32
    folder: str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    machine: str | None = None
    ranks: int | None = None
    layouts: tyro.conf.UseCounterAction[int] = 0
    json: tyro.conf.UseCounterAction[int] = 0

    def __post_init__(self) -> None:
        for name in ("global_batch", "ranks", "sequence"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')}: got {value}, expected at least 1")
        if self.machine is not None and self.ranks is None:
            raise ConfigError("--ranks: got nothing, expected the number of ranks on --machine")
        if self.layouts and self.machine is None:
            raise ConfigError(
                "--layouts: got no --machine; layouts are compared by the description of one, such as dgx-h100"
            )
        if self.machine is None and self.ranks is not None:
            raise ConfigError(
                f"--ranks: got {self.ranks} without --machine; start as many ranks: mpirun -n {self.ranks} python -m "
                "hpczero.plan --auto"
            )


def main(arguments: list[str], choose_config: Callable[[PlannedModel], GPTConfig]) -> int:
    """Print the choice; exit code 1 if nothing fits. Collective over MPI's world without ``--machine``.

    Args:
        arguments: of the command line, without ``--auto``.
        choose_config: the model that options name.
    """
    options = parse_command_line(
        AutoOptions,
        arguments,
        prog="python -m hpczero.plan --auto",
        description="Choose stage, memory tiers, checkpointing and micro-batch: what trains fastest within the memory. "
        "Start it under mpirun or srun as the training would be, or name a --machine.",
    )
    config = choose_config(options)
    sequence = options.sequence or config.context
    if options.layouts:
        return _say_layouts(options, config, sequence)
    if options.machine is not None:
        choice = _on_sheet(options, config, sequence)
        _say(options, choice, [])
        return 0 if choice.best else EXIT_FAILURE
    # Here and not at the top: these start torch and MPI, which --help and bad options must not do.
    from hpczero.accelerator import choose_accelerator
    from hpczero.comm.uneven import carriers_of
    from hpczero.job import log
    from hpczero.job.launch import start_topology, use_own_cores
    from hpczero.run.starting.choosing import choose_here

    accelerator = choose_accelerator(options.device)
    topology = start_topology(None)
    log.configure(rank=topology.rank, node_index=topology.node_index, level="info")
    use_own_cores(topology)
    media: list[Any] = [] if accelerator.is_host else ["host"]
    media += ["disk"] if options.folder is not None else []
    with topology.agreed("plan the run"):
        transport = fastest_transport(
            topology.local_size,
            topology.num_nodes,
            on_host=accelerator.is_host,
            rectangular=topology.is_rectangular,
        )
        base = _base(options, config, sequence, topology.size, topology.local_size, transport)
        base = dataclasses.replace(
            base, carriers=carriers_of(topology.world), on_device=not accelerator.is_host
        )
    freedom = Freedom(media=media, rests=media, folder=options.folder)
    choice, troubles = choose_here(base, config, freedom, topology, accelerator)
    if topology.is_root:
        _say(options, choice, troubles)
    topology.free()
    return 0 if choice.best else EXIT_FAILURE


def _base(
    options: AutoOptions,
    config: GPTConfig,
    sequence: int,
    ranks: int,
    local_size: int,
    transport: Any,
) -> PlannedRun:
    if options.global_batch % ranks:
        near = -(-options.global_batch // ranks) * ranks
        raise ConfigError(
            f"--global-batch: got {options.global_batch}, expected a multiple of {ranks} ranks, such as {near}"
        )
    return PlannedRun(
        config,
        Mesh(shard=ranks),
        local_size,
        transport=transport,
        precision=options.precision,
        reduce=options.reduce,
        sequence=sequence,
        micro_batch=options.global_batch // ranks,
    )


def _on_sheet(options: AutoOptions, config: GPTConfig, sequence: int) -> Choice:
    assert options.machine is not None
    assert options.ranks is not None, "checked"
    machine = load_machine(options.machine)
    local = min(machine.ranks_per_node, options.ranks)
    if options.ranks % local:
        raise ConfigError(
            f"--ranks: got {options.ranks}, expected whole nodes of {local} ranks, e.g. "
            f"{-(-options.ranks // local) * local}"
        )
    transport = fastest_transport(local, options.ranks // local, on_host=machine.shares_memory)
    base = _base(options, config, sequence, options.ranks, local, transport)
    base = dataclasses.replace(base, on_device=not machine.shares_memory)
    media: list[Any] = [medium for medium in ("host", "disk") if all(machine.tier_rates(medium))]
    # Ranks compute there, or nobody knows what fits.
    if machine.shares_memory or not machine.host_memory:
        media = [medium for medium in media if medium != "host"]
    freedom = Freedom(media=media, rests=media, folder=options.folder or "FOLDER")

    def fits(run: PlannedRun) -> bool:
        return run.most - run.tiered <= machine.usable and run.tiered <= machine.host_memory

    prediction_of = prediction_on(machine)
    return search(base, freedom, prediction_of, fits=fits, balance=balance_on(base, machine))


def _say_layouts(options: AutoOptions, config: GPTConfig, sequence: int) -> int:
    """Print the layouts that fit, the best first; exit code 1 if none does."""
    assert options.machine is not None
    assert options.ranks is not None, "checked"
    machine = load_machine(options.machine)
    found = search_layouts(
        dataclasses.replace(config, context=sequence),
        machine,
        ranks=options.ranks,
        precision=options.precision,
        reduce=options.reduce,
        global_batch=options.global_batch,
    )
    ranges = [StepRange.around(one.step) for one in found]
    if options.json:
        shown = [
            {
                **one.spread.as_json(),
                "step_s": one.step.step_s,
                "step_fast_s": between.fast.step_s,
                "step_slow_s": between.slow.step_s,
                "mfu": one.step.mfu,
                "needed_nbytes": one.spread.needed_nbytes,
                "options": options_of_layout(one),
            }
            for one, between in zip(found, ranges, strict=True)
        ]
        sys.stdout.write(f"{json.dumps({'fitting': shown}, indent=2)}\n")
    elif found:
        best = _numbered([describe_layout(one) for one in found[:SHOWN]], ranges)
        said = [
            f"of {len(found)} layouts that fit {options.ranks} ranks of {machine.title}, predicted, nothing was run:",
            *best,
            *filter(None, (alike(ranges, _numbers(found)),)),
            f"pin the first: {options_of_layout(found[0])}",
        ]
        sys.stdout.write("\n".join([*said, ""]))
    else:
        sys.stdout.write(
            f"no layout of {options.ranks} ranks of {machine.title} fits a global batch of {options.global_batch}\n"
        )
    return 0 if found else EXIT_FAILURE


def _numbers(found: Sequence[object]) -> list[str]:
    return [f"{one + 1}" for one in range(len(found))]


def _numbered(described: Sequence[str], ranges: Sequence[StepRange]) -> list[str]:
    """Lines that begin with their number, and say how long a step may take; with neither where that is not known."""
    if not spread(ranges[0]):
        return [f"  {text}" for text in described]
    pairs = enumerate(zip(described, ranges, strict=False), 1)
    return [f"  {number}. {text}; step {spread(found)}" for number, (text, found) in pairs]


def _say(options: AutoOptions, choice: Choice, troubles: list[str]) -> None:
    if options.json:
        sys.stdout.write(f"{json.dumps(as_json(choice, troubles), indent=2)}\n")
        return
    said = [*troubles, f"precision {options.precision} (--precision)"]
    if choice.best is None:
        least = choice.too_large
        closest = f"; closest: {describe(least)}" if least else ""
        said.append(f"nothing fits of {choice.tried} settings{closest}")
    else:
        said += [*lines(choice), "", f"the best of {len(choice.fitting)} that fit:"]
        ranges = [StepRange.around(found.step) for found in choice.fitting]
        said += _numbered([describe(found) for found in choice.fitting[:SHOWN]], ranges)
        said += filter(None, (alike(ranges, _numbers(choice.fitting)),))
    sys.stdout.write("\n".join([*said, ""]))


def as_json(choice: Choice, troubles: list[str]) -> dict[str, object]:
    """The choice for programs: seconds, bytes, options."""

    def of(what: object, *names: str) -> dict[str, object]:
        return {name: getattr(what, name) for name in names}

    def one(found: Predicted) -> dict[str, object]:
        between = StepRange.around(found.step)
        run, times = found.run, ("forward_s", "backward_s", "communication_s")
        return {
            **of(run, "stage", "micro_batch", "accumulation", "checkpointing"),
            **of(run.offload, "optimizer", "gradients", "parameters", "fraction", "step"),
            "inputs": run.kept.rest,
            **of(found.step, "step_s", *times, "update_s", "tier_s"),
            "step_fast_s": between.fast.step_s,
            "step_slow_s": between.slow.step_s,
            "most_nbytes": run.most,
            "away_nbytes": run.memory.away,
            "inputs_away_nbytes": run.inputs_away,
            "options": options_of(run),
        }

    return {
        "best": one(choice.best) if choice.best else None,
        "runner_up": one(choice.runner_up) if choice.runner_up else None,
        "too_large": one(choice.too_large) if choice.too_large else None,
        "tried": choice.tried,
        "troubles": troubles,
        "fitting": [one(found) for found in choice.fitting],
    }
