"""What tests ask of a corpus: its text block by block."""

from __future__ import annotations

from hpczero.data.corpus import TextSource


def blocks_of(document: TextSource) -> list[bytes]:
    """The text of all blocks, in order."""
    numbers = range(len(document.table))
    return [b"".join(text.text for text in document.texts(number)) for number in numbers]
