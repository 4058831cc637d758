"""`sdxl eval fetch`: download the files that score MLPerf's task, and check their digests.

Addresses and digests are in sources.toml or the user's file.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from sdxl.arguments import Parser, add_option
from sdxl.files import prepare_folder, write_atomic
from sdxl.params import InvalidParams

SOURCES = Path(__file__).with_name("sources.toml")
RECORD = "sources.toml"
TIMEOUT_S = 60.0


def sha256_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def git_blob_of(content: bytes) -> str:
    """The id that `git hash-object` prints."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


DIGESTS = {"sha256": (sha256_of, 64), "git_blob": (git_blob_of, 40)}
"""functions, and the number of hexadecimal digits that they return"""


class FetchFailed(RuntimeError):
    """A file could not be downloaded, or has another digest."""


@dataclass(frozen=True)
class RemoteFile:
    """A file's path below the folder, its address and its digests. An unknown digest is empty."""

    path: str
    url: str
    sha256: str = ""
    git_blob: str = ""

    @property
    def has_digest(self) -> bool:
        return bool(self.sha256 or self.git_blob)

    def check(self, content: bytes) -> None:
        for name, (digest_of, _) in DIGESTS.items():
            digest, needed = digest_of(content), getattr(self, name)
            if needed and digest != needed:
                raise FetchFailed(f"{self.url}: has {name} {digest}, expected {needed}")


def main(argv: Sequence[str]) -> int:
    options = build_parser().parse_args(argv)
    sources, folder = Path(options.sources or SOURCES), Path(options.out)
    files = read_sources(sources)
    unknown = [file.path for file in files if not file.has_digest]
    if unknown and not options.is_recording:
        needed = (
            f"needs a digest of {', '.join(unknown)}; add it in a copy (--sources FILE), "
            "or --record, which records the digest of the download"
        )
        raise InvalidParams("sources", str(sources), needed)
    prepare_folder(folder)
    fetched = [replace(file, sha256=fetch(file, folder)) for file in files]
    write_atomic(folder / RECORD, as_toml(fetched).encode())
    print(f"{len(fetched)} files in {folder}; their sha256 in {folder / RECORD}")
    return 0


def build_parser() -> Parser:
    description = "Download the files that score MLPerf's task."
    parser = Parser(prog="sdxl eval fetch", description=description)
    add = partial(add_option, parser)
    add("--out", "mlperf", "folder for the files", "DIR")
    add("--sources", None, "addresses and digests, as TOML (default: built in)", "FILE")
    text = "accept files without a digest, and record their sha256"
    add("--record", False, text, dest="is_recording")
    return parser


def read_sources(path: Path) -> list[RemoteFile]:
    needed = "must hold TOML with [[file]] tables of path, url and sha256 or git_blob, all text"
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))["file"]
        files = [RemoteFile(**table) for table in tables]
        if not all(isinstance(value, str) for file in files for value in vars(file).values()):
            raise TypeError("a value is not text")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidParams("sources", str(path), f"{needed} ({error})") from error
    for file in files:
        place = Path(file.path)
        if place.is_absolute() or ".." in place.parts or not place.name:
            raise InvalidParams("path", file.path, f"must be below the folder ({path})")
        if not file.url.startswith(("https://", "http://127.0.0.1:")):
            raise InvalidParams("url", file.url, f"must start with https:// ({path})")
        for name, (_, count) in DIGESTS.items():
            digits = getattr(file, name)
            if digits and not re.fullmatch(f"[0-9a-f]{{{count}}}", digits):
                raise InvalidParams(name, digits, f"must be {count} hexadecimal digits")
    return files


def fetch(file: RemoteFile, folder: Path) -> str:
    """Download the file unless a correct one is there. Return its sha256."""
    path = folder / file.path
    if path.exists() and file.has_digest:
        file.check(content := path.read_bytes())
        return sha256_of(content)
    prepare_folder(path.parent)
    file.check(content := download(file.url))
    write_atomic(path, content)
    note = "" if file.has_digest else "; not checked: no digest is known"
    print(f"{path}: {len(content)} bytes, sha256 {(sha256 := sha256_of(content))}{note}")
    return sha256


def download(url: str) -> bytes:
    import httpx

    try:
        answer = httpx.get(url, follow_redirects=True, timeout=TIMEOUT_S).raise_for_status()
        return answer.content
    except httpx.HTTPError as error:
        line = " ".join(str(error).split())[:200]
        raise FetchFailed(f"{url}: could not be fetched ({line})") from error


def as_toml(files: Sequence[RemoteFile]) -> str:
    tables = [
        [f'{name} = "{value}"' for name, value in vars(file).items() if value] for file in files
    ]
    return "\n\n".join("\n".join(["[[file]]", *lines]) for lines in tables) + "\n"
