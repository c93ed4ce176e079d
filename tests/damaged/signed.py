"""Files of somebody who means harm: the right digest is put on them after the harm, and before they are read.

What they say is taken, if it can be; nothing else may happen.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import hpczero
from hpczero.data import appendix
from tests.checkpoint.damage import fingerprint
from tests.damaged.subjects import (
    Subject,
    checkpoints,
    program,
    run_checkpoint,
    sampled_checkpoint,
    token_file,
    tokens,
    torch_file,
    weights,
)


def body_of(folder: Path, manifest: Path) -> Path:
    """The object of a manifest, which ``sign`` makes one of again."""
    body = json.loads(manifest.read_text())
    del body["sha256"]
    (folder / "body").write_text(json.dumps(body))
    return folder / "body"


def sign(folder: Path, checkpoints: Path) -> None:
    """Put the right digest on what came to harm, in the newest of the checkpoints."""
    head = (folder / "body").read_text(errors="replace").rstrip()[:-1]
    digest = hashlib.sha256(head.encode()).hexdigest()
    newest = max(checkpoints.glob("step-*"))
    (newest / "manifest.json").write_text(f'{head}, "sha256": "{digest}"}}')


def load_signed(folder: Path) -> Any:
    sign(folder, folder / "ckpt")
    # Without the scheduler: what ``extra`` says is the caller's to believe.
    found = hpczero.checkpoint.load(folder / "ckpt", program().model)
    return found.step, found.extra, fingerprint(program())


def sample_signed(folder: Path) -> Any:
    sign(folder, folder)
    return sampled_checkpoint(folder)


def signed_tokens(folder: Path) -> Path:
    """The description at the end of a token file."""
    data = token_file(folder).read_bytes()
    nbytes = int(data[-appendix.LINE_NBYTES :].split(b"described in ")[1].split(b",")[0])
    (folder / "rest").write_bytes(data[: -appendix.LINE_NBYTES - nbytes])
    (folder / "body").write_bytes(data[-appendix.LINE_NBYTES - nbytes : -appendix.LINE_NBYTES])
    return folder / "body"


def read_signed_tokens(folder: Path) -> Any:
    rest, text = (folder / "rest").read_bytes(), (folder / "body").read_bytes()
    nbytes = len(rest) + len(text) + appendix.LINE_NBYTES
    line = f"hpczero tokens 2: {nbytes} bytes, described in {len(text)}, sha256 {hashlib.sha256(text).hexdigest()}"
    ended = line.encode().ljust(appendix.LINE_NBYTES - 1) + b"\n"
    (folder / "tokens.h5").write_bytes(rest + text + ended)
    return tokens(folder)


def signed_pickle(folder: Path) -> Path:
    """What a torch file says of its tensors."""
    with zipfile.ZipFile(torch_file(folder)) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        (folder / "body").write_bytes(archive.read(name))
    return folder / "body"


def read_signed_pickle(folder: Path) -> Any:
    """The archive is written anew by zipfile, with right checksums."""
    file = folder / "weights" / "weights.pt"
    with zipfile.ZipFile(file) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in parts.items():
            pickled = name.endswith("/data.pkl")
            archive.writestr(name, (folder / "body").read_bytes() if pickled else data)
    return weights(folder)


SIGNED: dict[str, Subject] = {
    "manifest, signed": Subject(
        lambda f: body_of(f, checkpoints(f / "ckpt", "manifest.json")),
        load_signed,
        is_text=True,
        signed=True,
    ),
    "manifest, signed, sampled": Subject(
        lambda f: body_of(f, run_checkpoint(f, "manifest.json")),
        sample_signed,
        is_text=True,
        signed=True,
    ),
    "token file, signed": Subject(signed_tokens, read_signed_tokens, is_text=True, signed=True),
    "torch file, signed": Subject(signed_pickle, read_signed_pickle, signed=True),
}
