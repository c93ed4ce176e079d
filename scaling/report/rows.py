"""What a row of each kind must have before a report may read it.

Owns: those names. Must not know: what the reports say. Somebody may have been killed while writing a file, or have
edited it; what is left of it is still worth showing.
"""

from __future__ import annotations

from hpczero.errors import ConfigError
from scaling.evidence.record import Row
from scaling.sweep.curves import PARTS
from scaling.sweep.study import Point

_WHERE = ("cpu", "cores", "commit", "date")

# By the kind of file, then by the kind of row; kinds that are not here are for nobody, and do no harm.
NEEDS: dict[str, dict[str, tuple[str, ...]]] = {
    "bridge": {
        "run": (*_WHERE, "load", "placement", "ranks", "rounds"),
        "call": ("verb", "dtype", "mib", "backend", "round", "seconds", "cpu_s"),
    },
    "checkpoint": {
        "run": (
            *_WHERE,
            *("description", "filesystem", "hdf5", "mpi_io", "ranks", "rounds", "shard_nbytes"),
            *("state_nbytes", "versions"),
        ),
        "move": ("way", "round", "save_s", "load_s"),
        "hold": ("quiet_s", "busy_s", "copy_s", "hold_s", "write_s"),
        "memory": ("way", "save_extra_nbytes", "load_extra_nbytes"),
    },
    "collectives": {
        "run": (
            *_WHERE,
            *("emulated", "mpi", "nic_gbit", "nodes", "placement", "ranks", "rounds", "selection"),
        ),
        "call": ("operation", "mover", "shard_nbytes", "round", "seconds"),
    },
    "gpu": {"failure": ("check", "ranks", "said")},
    "hostcost": {
        "run": (*_WHERE, "model", "precision", "kernel_us", "operation_us", "against"),
        "case": (
            *("tree", "ranks", "ranks_per_node", "units", "messages", "gather_messages"),
            *("reduce_messages", "exchange_nbytes", "kernels", "operations"),
            *("gather_s", "exchange_s", "agreements_s"),
        ),
    },
    "layouts": {
        "run": (
            *_WHERE,
            *("description", "emulated", "placement", "ranks", "rate_mbit", "rounds", "steps"),
            "tolerance",
        ),
        "layout": ("layout", "foretold_s", "planned_nbytes"),
        "turn": ("layout", "round", "seconds", "sent_nbytes", "waited_s"),
        "idle": ("pipeline", "stages", "nap_s", "simulated", "formula", "ranks"),
    },
    "overhead": {
        "run": (*_WHERE, "description", "rounds", "steps"),
        "stepper": ("name", "waits"),
        "turn": ("name", "round", "seconds"),
    },
    "parallel": {
        "run": (*_WHERE, "description", "precision", "ranks", "rounds", "tolerance"),
        "match": ("match", "title", "own", "other", "goal", "apart"),
        "turn": ("contender", "round", "seconds", "steps", "window_s", "foreign_cpu_s"),
    },
    "peers": {
        "run": (*_WHERE, "description", "ranks", "rounds", "titles", "versions"),
        "turn": (
            *("contender", "group", "round", "seconds", "steps", "window_s", "foreign_cpu_s"),
            "sleeping_cpu_s",
        ),
        "memory": ("contender", "settings", "baseline_nbytes", "step_peak_nbytes"),
        "losses": ("losses",),
    },
    "predict": {
        "run": (*_WHERE, "rounds", "steps", "tolerance"),
        "turn": ("workload", "ranks", "stage", "measured_s", "predicted_s", "foreign_share"),
    },
    "simulate": {  # of a job, and of layouts beside those of emulated hosts
        "run": _WHERE,
        "job": (
            *("layout", "ranks", "ranks_per_node", "stage", "recorded", "calls", "step_s", "spent"),
            *("idle_s", "between_nbytes", "messages", "links", "binds"),
            *("foretold_s", "foretold_compute_s", "took_s", "peak_nbytes"),
        ),
        "layout": ("layout", "seconds", "step_s", "links", "binds"),
    },
    "sweep": {
        "run": (
            *("study", "grow", "definition", "points_asked", "points_done", "malformed", "steps"),
            "warm_up",
        ),
        "point": (
            *(*_WHERE, "point", "versions", "mpi", "python", "kernel", "memory_gib", "threads"),
            *("placement", "hosts", "emulated", "oversubscribed", "transport", "flops_per_token"),
            *("samples_ms", "losses", "pss_peak_nbytes", "pss_baseline_nbytes", "ledger_nbytes"),
            *("planned", "foreign_share", "probe"),
        ),
    },
    "tiers": {
        "run": (*_WHERE, "description", "ranks", "rounds", "tier", "staging"),
        "case": ("case", "round", "seconds", "waited_s"),
    },
    "transports": {
        "run": (
            *_WHERE,
            *("description", "emulated", "link", "placement", "ranks", "rounds", "stage"),
        ),
        "step": ("transport", "round", "seconds"),
        "transport": ("transport", "description"),
    },
}


def is_sound(kind: str, row: Row) -> bool:
    """Whether a report of files of ``kind`` can read ``row``."""
    if not row.keys() >= set(NEEDS.get(kind, {}).get(row["kind"], ())):
        return False
    return _is_point(row) if (kind, row["kind"]) == ("sweep", "point") else True


def _is_point(row: Row) -> bool:
    """Whether it is a point with at least one step, in all its parts."""
    try:
        Point.of_json(row["point"])
        return all(row["samples_ms"][part] for part in (*PARTS, "checkpoint"))
    except (ConfigError, KeyError, TypeError):
        return False
