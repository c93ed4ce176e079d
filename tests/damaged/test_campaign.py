"""A sample of the campaign: every kind of file comes to harm, and no reader is silent, hangs or ends in a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.damaged.campaign import BAD, Case, Outcome, plan, run, table
from tests.damaged.signed import SIGNED
from tests.damaged.subjects import SUBJECTS

EACH = 6  # cases of a subject
SEED = 1


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    """Of a few cases of every subject; ``python -m tests.damaged`` does a thousand."""
    signed = plan(EACH * len(SIGNED), SEED, tuple(SIGNED))
    return run([*plan(EACH * len(SUBJECTS), SEED), *signed])


@pytest.mark.slow
@pytest.mark.limit(300)
@pytest.mark.parametrize("subject", [*SUBJECTS, *SIGNED])
def test_no_harm_is_silent_and_none_ends_a_reader(subject: str, outcomes: list[Outcome]) -> None:
    mine = [outcome for outcome in outcomes if outcome.case.subject == subject]
    assert len(mine) >= EACH
    assert [str(o.case) for o in mine if o.kind in BAD] == [], table(mine)


# Readers of a file of 72 bytes that are silent, warn of it whatever it is, die or hang where it is another.
BROKEN = """
import logging, os, signal, sys, time
if "serve" in sys.orig_argv:
    import tests.damaged.campaign as campaign
    from tests.damaged.subjects import SUBJECTS, Subject
    campaign.CASE_S = 1

    def make(folder):
        (folder / "x").write_text("12345678" * 9)
        return folder / "x"

    def silent(folder):
        return (folder / "x").read_bytes()

    def warns(folder):
        logging.getLogger("hpczero").warning("has no digests")
        return silent(folder)

    def dies(folder):
        return silent(folder) if len(silent(folder)) == 72 else os.kill(os.getpid(), signal.SIGSEGV)

    def hangs(folder):
        return silent(folder) if len(silent(folder)) == 72 else time.sleep(60)

    for read in (silent, warns, dies, hangs):
        SUBJECTS[read.__name__] = Subject(make, read)
    SUBJECTS["unsigned"] = Subject(make, warns, has_digest=False)
"""


@pytest.mark.tool
def test_a_reader_that_is_silent_hangs_or_dies_is_counted_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With readers that do so, in the very process that counts others."""
    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    monkeypatch.setattr("tests.damaged.campaign.PATH", [str(tmp_path)])
    names = ("silent", "dies", "hangs", "silent", "warns", "unsigned")
    outcomes = run([Case(name, "one byte short", 0) for name in names])
    kinds = [outcome.kind for outcome in outcomes]
    # What is warned of a sound file, too, tells nobody of the harm.
    assert kinds == ["silent", "signal", "hang", "silent", "silent", "unseen"]
    assert "unseen: changes of files that carry no digest (unsigned)" in table(outcomes)
