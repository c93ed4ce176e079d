"""``python -m tests.compat`` writes the tables of docs/compatibility.md, and the figures of them in README.md."""

from __future__ import annotations

import re
from pathlib import Path

from tests.compat import architectures, libraries, table
from tests.compat.construct import Construct

README = Path(__file__).resolve().parents[2] / "README.md"
DOCUMENT = README.parent / "docs" / "compatibility.md"
BEGIN, END = "<!-- tables -->\n", "<!-- end of tables -->\n"
SECTIONS = {
    **table.SECTIONS,
    "transformers, trained with `labels=...`": architectures.CONSTRUCTS,
    "transformers, peft, accelerate": libraries.habits,
}


def outcome(construct: Construct) -> str:
    """What the second column says."""
    if not construct.refused:
        return "works"
    stages = construct.refused_stages
    where = "" if stages is None else f" at stage {', '.join(map(str, stages))}"
    said = "* or *".join(construct.refused.split("|"))
    whose = " by torch itself" if construct.by_torch else ""
    return f"refused{where}{whose}: *{said}*"


def tables() -> str:
    """All of them, a heading before each."""
    lines = []
    for heading, constructs in SECTIONS.items():
        lines += [f"\n## {heading}\n", "| Code | Outcome | Note |", "|---|---|---|"]
        lines += [
            f"| {each.says[:1].upper()}{each.says[1:]} | {outcome(each)} | {each.remark} |"
            for each in constructs
        ]
    return "\n".join(lines) + "\n\n"


def figures() -> tuple[int, int, int]:
    """(constructs that work, that are refused at stage 3 alone, that are refused)."""
    every = [each for constructs in SECTIONS.values() for each in constructs]
    works = sum(not each.refused for each in every)
    partly = sum(each.refused_stages is not None for each in every)
    return works, partly, len(every) - works - partly


def count() -> str:
    """The line of figures above the tables."""
    works, partly, refused = figures()
    return (
        f"{works + partly + refused} constructs: {works} work, {partly} work at stages 0 to 2 and are refused at "
        f"stage 3, {refused} are refused.\n"
    )


def expected(text: str) -> str:
    """``text`` with its tables as they should be."""
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n{count()}{tables()}{END}{after}"


def in_readme(text: str) -> str:
    """README's ``text`` with its figures as they should be."""
    works, partly, refused = figures()
    every = f"of {works + partly + refused} constructs of ordinary torch code"
    said = f"{every} {refused} are refused by name, and {partly} more at stage 3"
    return re.sub(r"of \d+ constructs .* more at stage 3", said, text)


if __name__ == "__main__":
    DOCUMENT.write_text(expected(DOCUMENT.read_text()))
    README.write_text(in_readme(README.read_text()))
