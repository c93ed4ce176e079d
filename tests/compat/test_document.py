"""docs/compatibility.md says of every construct what its test holds it to, and of nothing else."""

from __future__ import annotations

from tests.compat import __main__ as document

EVERY = [each for constructs in document.SECTIONS.values() for each in constructs]


def test_tables_are_those_of_the_constructs() -> None:
    text = document.DOCUMENT.read_text()
    assert text == document.expected(text), "type: python -m tests.compat"
    readme = document.README.read_text()
    assert "constructs of ordinary torch code" in readme
    assert readme == document.in_readme(readme), "type: python -m tests.compat"


def test_names_and_lines_are_each_of_one_construct() -> None:
    names = [each.name for each in EVERY]
    says = [each.says for each in EVERY]
    assert sorted({name for name in names if names.count(name) > 1}) == []
    assert sorted({line for line in says if says.count(line) > 1}) == []
    assert not any("|" in each.says + each.remark for each in EVERY), "a table's cells end there"
