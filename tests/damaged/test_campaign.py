"""A sample of the campaign: every kind of file comes to harm, and no reader is silent, hangs or ends in a traceback."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.damaged.campaign import (
    BAD,
    HANG,
    SIGNAL,
    SILENT,
    UNSEEN,
    Case,
    Outcome,
    plan,
    run,
    table,
)
from tests.damaged.harms import HARMS, HARMS_OF_TEXT, PLACES
from tests.damaged.signed import SIGNED
from tests.damaged.subjects import SUBJECTS

EACH = 6  # cases of a subject
SEED = 1


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    """Of a few cases of every subject; ``python -m tests.damaged`` does a thousand."""
    return run(
        [
            *plan(EACH * len(SUBJECTS), SEED),
            *plan(EACH * len(SIGNED), SEED, tuple(SIGNED)),
        ]
    )


@pytest.mark.slow
@pytest.mark.limit(300)
@pytest.mark.parametrize("subject", [*SUBJECTS, *SIGNED])
def test_no_harm_is_silent_and_none_ends_a_reader(subject: str, outcomes: list[Outcome]) -> None:
    mine = [outcome for outcome in outcomes if outcome.case.subject == subject]
    assert len(mine) >= EACH
    assert [str(o.case) for o in mine if o.kind in BAD] == [], table(mine)


def test_every_harm_changes_a_file(tmp_path: Path) -> None:
    """Or a case would show nothing."""
    text = b'{"a": 12, "b": [3.5, 4], "c": "' + bytes(range(65, 91)) * 200 + b'"}\n{"d": 6}\n'
    for name, harm in HARMS_OF_TEXT.items():
        path = tmp_path / "file"
        path.write_bytes(text)
        harm(path, random.Random(3))
        if name in PLACES:
            assert path.is_symlink() or not path.is_file() or path.stat().st_size > 2**41
        else:
            assert path.read_bytes() != text, name
        if path.is_dir():
            path.rmdir()
        path.unlink(missing_ok=True)
    assert set(HARMS) < set(HARMS_OF_TEXT)


def test_plan_is_spread_over_subjects_and_harms_and_the_same_again() -> None:
    cases = plan(1000, 0)
    assert cases == plan(1000, 0)
    assert len(cases) == 1000
    for name in SUBJECTS:
        mine = [case for case in cases if case.subject == name]
        assert len(mine) in (1000 // len(SUBJECTS), 1000 // len(SUBJECTS) + 1)
        assert len({case.harm for case in mine}) >= len(HARMS) - 2


@pytest.mark.tool
def test_a_reader_that_is_silent_hangs_or_dies_is_counted_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With readers that do so, in the very process that counts others."""
    broken = tmp_path / "sitecustomize.py"
    broken.write_text(
        "import logging, os, signal, sys, time\n"
        "if sys.argv[-1:] == ['serve'] or 'serve' in sys.orig_argv:\n"
        "    import tests.damaged.subjects as s, tests.damaged.campaign as c\n"
        "    c.CASE_S = 1\n"
        "    def make(folder):\n        (folder / 'x').write_text('12345678' * 9)\n        return folder / 'x'\n"
        "    def dies(folder):\n"
        "        text = (folder / 'x').read_bytes()\n"
        "        return text if len(text) == 72 else os.kill(os.getpid(), signal.SIGSEGV)\n"
        "    def hangs(folder):\n"
        "        text = (folder / 'x').read_bytes()\n"
        "        return text if len(text) == 72 else time.sleep(60)\n"
        "    s.SUBJECTS['silent'] = s.Subject(make, lambda folder: (folder / 'x').read_bytes())\n"
        "    def warns(folder):\n"
        "        logging.getLogger('hpczero').warning('has no digests')\n"
        "        return (folder / 'x').read_bytes()\n"
        "    s.SUBJECTS['warns'] = s.Subject(make, warns)\n"
        "    s.SUBJECTS['unsigned'] = s.Subject(make, warns, has_digest=False)\n"
        "    s.SUBJECTS['dies'] = s.Subject(make, dies)\n"
        "    s.SUBJECTS['hangs'] = s.Subject(make, hangs)\n"
    )
    monkeypatch.setattr("tests.damaged.campaign.PATH", [str(tmp_path)])
    names = ("silent", "dies", "hangs", "silent", "warns", "unsigned")
    outcomes = run([Case(name, "one byte short", 0) for name in names])
    kinds = [outcome.kind for outcome in outcomes]
    # What is warned of a sound file, too, tells nobody of the harm.
    assert kinds == [SILENT, SIGNAL, HANG, SILENT, SILENT, UNSEEN]
    assert "unseen: changes of files that carry no digest (unsigned)" in table(outcomes)
