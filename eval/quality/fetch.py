"""`sdxl eval fetch`: download the files that score MLPerf's task, and check their digests.

Addresses and digests are data, in sources.toml or the user's file.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from eval.measuring.options import add_option
from sdxl.arguments import Parser
from sdxl.files import prepare_folder, write_atomic
from sdxl.params import InvalidParams

SOURCES = Path(__file__).with_name("sources.toml")
RECORD = "sources.toml"
TIMEOUT_S = 60.0
CHUNK = 1 << 20


def sha256_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def git_blob_of(content: bytes) -> str:
    """The id that `git hash-object` prints."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


DIGESTS = {"sha256": sha256_of, "git_blob": git_blob_of}
DIGITS = {"sha256": 64, "git_blob": 40}
FEWEST_DIGITS = 8


class FetchFailed(RuntimeError):
    """A file could not be downloaded, or has another digest."""


@dataclass(frozen=True)
class RemoteFile:
    """One file: its path below the folder, its address, and the first digits of its digests. An
    unknown digest is empty."""

    path: str
    url: str
    sha256: str = ""
    git_blob: str = ""

    @property
    def has_digest(self) -> bool:
        return any(getattr(self, name) for name in DIGESTS)

    def check(self, content: bytes) -> None:
        for name, digest_of in DIGESTS.items():
            digest, needed = digest_of(content), getattr(self, name)
            if not digest.startswith(needed):
                raise FetchFailed(f"{self.url}: has {name} {digest}, needed {needed}")


def main(argv: Sequence[str]) -> int:
    options = build_parser().parse_args(argv)
    sources, folder = Path(options.sources or SOURCES), Path(options.out)
    files = read_sources(sources)
    unknown = [file.path for file in files if not file.has_digest]
    if unknown and not options.is_recording:
        needed = (
            f"has no digest of {', '.join(unknown)}; needed one in a copy of it (--sources FILE), "
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
    needed = "needed TOML with [[file]] tables of path, url and sha256 or git_blob"
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))["file"]
        files = [RemoteFile(**table) for table in tables]
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise InvalidParams("sources", str(path), f"{needed} ({error})") from error
    for file in files:
        check_source(path, file)
    return files


def check_source(sources: Path, file: RemoteFile) -> None:
    if not all(isinstance(v, str) for v in vars(file).values()):
        raise InvalidParams("sources", str(sources), f"{file.path}: needed text")
    place = Path(file.path)
    if place.is_absolute() or ".." in place.parts or not place.name:
        raise InvalidParams("path", file.path, f"needed a place below the folder ({sources})")
    if not file.url.startswith(("https://", "http://127.0.0.1:")):
        raise InvalidParams("url", file.url, f"needed https:// ({sources})")
    for name in DIGESTS:
        check_digits(name, getattr(file, name))


def check_digits(name: str, digits: str) -> None:
    most = DIGITS[name]
    is_hexadecimal = not set(digits) - set("0123456789abcdef")
    if digits and not (is_hexadecimal and FEWEST_DIGITS <= len(digits) <= most):
        needed = f"needed {FEWEST_DIGITS} to {most} hexadecimal digits"
        raise InvalidParams(name, digits, needed)


def fetch(file: RemoteFile, folder: Path) -> str:
    """Download the file unless a correct one is there. Return its sha256."""
    path = folder / file.path
    if path.exists() and file.has_digest:
        file.check(content := path.read_bytes())
        return sha256_of(content)
    prepare_folder(path.parent)
    file.check(content := b"".join(download(file.url)))
    write_atomic(path, content)
    note = "" if file.has_digest else "; not checked: no digest is known"
    print(f"{path}: {len(content)} bytes, sha256 {(sha256 := sha256_of(content))}{note}")
    return sha256


def download(url: str) -> Iterator[bytes]:
    import httpx

    try:
        with httpx.stream("GET", url, follow_redirects=True, timeout=TIMEOUT_S) as answer:
            answer.raise_for_status()
            yield from answer.iter_bytes(CHUNK)
    except httpx.HTTPError as error:
        line = " ".join(str(error).split())[:200]
        raise FetchFailed(f"{url}: could not be fetched ({line})") from error


def as_toml(files: Sequence[RemoteFile]) -> str:
    def table(values: dict[str, Any]) -> str:
        lines = (f'{name} = "{value}"' for name, value in values.items() if value)
        return "\n".join(["[[file]]", *lines])

    return "\n\n".join(table(vars(file)) for file in files) + "\n"
