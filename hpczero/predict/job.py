"""What is trained, how it is spread over a machine, and how long its update takes."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from hpczero.errors import ConfigError
from hpczero.job.mesh import Mesh
from hpczero.models.config import GPTConfig
from hpczero.plan.offloaded import Sides
from hpczero.plan.spread import Spread
from hpczero.predict.machine import Kernels, Machine, Roofline


@dataclass(frozen=True)
class Pass:
    """Forwards or backwards of a step that are alike.

    Attributes:
        backward: whether they are backwards.
        reduces: whether gradients are reduced.
        times: how many there are.
    """

    backward: bool
    reduces: bool
    times: int


@dataclass(frozen=True)
class Job(Spread):
    """A spread on a machine. ``ConfigError`` where its ranks do not fill nodes.

    Attributes:
        machine: each node is one like it.
        kernels: kernels of one rank; None takes a roofline of the machine.
        overlap: whether communication between nodes is hidden where possible.
    """

    machine: Machine = field(kw_only=True)
    kernels: Kernels | None = field(default=None, repr=False)
    overlap: bool = True

    def __post_init__(self) -> None:
        if self.ranks > self.ranks_per_node and self.ranks % self.ranks_per_node:
            raise ConfigError(
                f"ranks: got {self.ranks}, expected a multiple of the {self.ranks_per_node} ranks of a node of "
                f"{self.machine.name}, or fewer than that"
            )
        nodes = -(-self.ranks // self.ranks_per_node)
        object.__setattr__(self, "machine", self.machine.reaching(nodes))  # frozen

    @classmethod
    def of(cls, spread: Spread, machine: Machine, **more: Any) -> Job:
        """``spread`` on ``machine``, with ``more`` fields."""
        given = {each.name: getattr(spread, each.name) for each in fields(Spread)}
        return cls(**{**given, **more}, machine=machine)

    @classmethod
    def plain(
        cls,
        model: GPTConfig,
        machine: Machine,
        ranks: int,
        stage: int,
        precision: str,
        micro_batch: int,
        *,
        ranks_per_node: int | None = None,
        **more: Any,
    ) -> Job:
        """All ranks share one set of shards.

        Args:
            model: sizes of the model.
            machine: each node is one like it.
            ranks: the world size.
            stage: ZeRO stage.
            precision: name.
            micro_batch: samples of one forward on one rank.
            ranks_per_node: of the job; None takes that of the machine.
            more: further fields.
        """
        return cls(
            model,
            Mesh(shard=ranks),
            ranks_per_node or machine.ranks_per_node,
            stage=stage,
            precision=precision,
            micro_batch=micro_batch,
            on_device=not machine.shares_memory,
            machine=machine,
            **more,
        )

    @property
    def again(self) -> bool:
        """Whether backward computes products again; selective checkpointing keeps what they give."""
        return self.checkpointing and self.kept.checkpointing != "selective"

    @property
    def norms_cut(self) -> int:
        """Ranks that share norms and sums of blocks."""
        return self.mesh.tensor if self.sequence_parallel else 1

    @property
    def passes(self) -> tuple[Pass, ...]:
        """Of one step those in which shards are exchanged: gradients are reduced in its last backward."""
        if self.mesh.pipeline > 1:
            return Pass(False, False, 1), Pass(True, True, 1)
        before = self.accumulation - 1
        return (Pass(False, False, before + 1), Pass(True, False, before), Pass(True, True, 1))

    @property
    def work(self) -> Kernels:
        """Kernels of one rank."""
        return self.kernels or Roofline(self.machine, self.precision, self.itemsize)


# How long an update takes of which the host takes a part, and which part lets both sides end together.
#
# Source: Ren et al., ZeRO-Offload, ATC21, sec. 4; `hpczero.plan.offloaded`.


def sides_of(machine: Machine, work: Kernels, *, up: float) -> Sides | None:
    """What an update costs on either side. Gradients come down behind backward, so they cost nothing here.

    Args:
        machine: with its host; None is the answer where that is not known.
        work: kernels of the device.
        up: bytes of an element that go back to the device.
    """
    down_rate, up_rate = machine.host_write, machine.host_read
    if not (machine.host_update and down_rate and up_rate):
        return None
    on_device = 1 / work.update_s(1)
    return Sides(machine.host_update, on_device, 0.0, up, down_rate, up_rate)


def update_s(job: Job, owned: int) -> float:
    """Seconds of the norm and the optimizer, ways to and from a tier left out.

    Args:
        job: with what rests elsewhere, and who steps on it.
        owned: elements of which a rank has the optimizer's state.
    """
    sides = sides_of(job.machine, job.work, up=0.0) if job.offload.on_host else None
    if sides is None or not owned:
        return job.work.update_s(owned)
    away = sum(unit.layout.shard_numel for unit in job.offloaded.away)
    return sides.step_s(owned, away / owned)
