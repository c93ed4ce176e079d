"""From the options about data to an open token file on every rank. Text is tokenized first if necessary.

Owns: who tokenizes, what is shown meanwhile, and that all ranks open the same file. Must not know: how text becomes
tokens, the training loop.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Literal

from hpczero.data import TokenFile
from hpczero.data.prepare import token_file
from hpczero.data.sources import Sources, names_sources
from hpczero.errors import DataError
from hpczero.job import log
from hpczero.job.root_work import done_by_root
from hpczero.job.topology import Topology
from hpczero.options.config import DataOptions
from hpczero.run.results.phases import PhaseBar, PhaseLines, phases_for
from hpczero.run.stopping.signals import Signals


def open_tokens(
    options: DataOptions,
    topology: Topology,
    *,
    progress: Literal["auto", "bar", "lines"] = "lines",
    signals: Signals | None = None,
) -> TokenFile | Sources:
    """Open what a run reads. Text is tokenized first if necessary: rank 0 does that, every rank opens it. Collective.

    Args:
        options: options about data.
        topology: of the ranks.
        progress: style in which rank 0 shows how far it is.
        signals: of this process. One that asks to stop, on any rank, ends the making. None listens to nothing.

    Raises:
        DataError: text or file is missing, empty or malformed, or not the same on all ranks; on every rank.
        StoppedEarly: a rank was asked to stop while the file was made; on every rank.
    """
    shown: PhaseBar | PhaseLines | nullcontext[None] = nullcontext()
    if topology.is_root:
        shown = phases_for(progress, lambda line: log.info("%s", line))
    tokens: TokenFile | Sources
    if names_sources(options.path):
        path = str(options.path)
        with topology.agreed("open the sources of tokens"):
            tokens = Sources.open(Path(path))
    else:
        # Of a large text it takes longer than any collective may.
        with shown as display:
            path = done_by_root(
                topology,
                "prepare the token file",
                lambda said: str(token_file(options, said)),
                show=lambda moment: display.show(moment) if display is not None else None,
                is_stopped=lambda: signals is not None and signals.came,
            )
        with topology.agreed("open the token file"):
            tokens = TokenFile.open(Path(path))
    # Of one path: nodes may have folders of their own there.
    first = topology.broadcast_text(tokens.fingerprint)
    with topology.agreed("compare the token file with that of rank 0"):
        if tokens.fingerprint != first:
            raise DataError(f"{path}: another file; bring the same one to every node")
    return tokens
