"""`sdxl eval fetch`: the files that MLPerf's task is judged by, each held to its sha256.

Where they are and what they must hash to is data, in sources.toml or a file of the user's.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdxl.arguments import Parser
from sdxl.files import prepare_folder, write_atomic
from sdxl.params import InvalidParams

OWN = Path(__file__).with_name("sources.toml")
RECORD = "sources.toml"
DIGITS = 64
TIMEOUT_S = 60.0
CHUNK = 1 << 20


class FetchFailed(RuntimeError):
    """A file that could not be had, or is not the one that it should be."""


@dataclass(frozen=True)
class RemoteFile:
    """One file: its path below the folder, its address, and how its sha256 begins. Of some only the
    first digits are published; none of those whose digest nobody published."""

    path: str
    url: str
    sha256: str = ""

    def check(self, found: str) -> None:
        if not self.sha256 or not found.startswith(self.sha256):
            raise FetchFailed(f"{self.url}: has sha256 {found}, needed {self.sha256 or 'one'}")


def main(argv: Sequence[str]) -> int:
    options = build_parser().parse_args(argv)
    sources, folder = Path(options.sources or OWN), Path(options.out)
    files = read_sources(sources)
    unknown = [file.path for file in files if not file.sha256]
    if unknown and not options.is_recording:
        needed = (
            f"has no sha256 of {', '.join(unknown)}: nobody published them; needed them in a copy "
            "of it (--sources FILE), or --record, which takes what comes and holds to it after"
        )
        raise InvalidParams("sources", str(sources), needed)
    prepare_folder(folder)
    found = [RemoteFile(f.path, f.url, fetch(f, folder)) for f in files]
    write_atomic(folder / RECORD, as_toml(found).encode())
    print(f"{len(found)} files in {folder}; their sha256 in {folder / RECORD}")
    return 0


def build_parser() -> Parser:
    parser = Parser(prog="sdxl eval fetch", description="Fetch what MLPerf's task is judged by.")
    add = parser.add_argument
    add("--out", default="mlperf", metavar="DIR", help="where to put them (default %(default)s)")
    add("--sources", metavar="FILE", help="TOML: their addresses and sha256 (default: our own)")
    add(
        "--record",
        action="store_true",
        dest="is_recording",
        help="take files of unknown sha256 as they come, and write it down",
    )
    return parser


def read_sources(path: Path) -> list[RemoteFile]:
    needed = "needed TOML with [[file]] tables of path, url and sha256"
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
    digits = file.sha256
    if len(digits) > DIGITS or set(digits) - set("0123456789abcdef") or 0 < len(digits) < 8:
        raise InvalidParams("sha256", digits, f"needed 8 to {DIGITS} hexadecimal digits")


def fetch(file: RemoteFile, folder: Path) -> str:
    """Its sha256. One that is there and right is not fetched again."""
    path = folder / file.path
    if path.exists() and file.sha256:
        file.check(found := hashlib.sha256(path.read_bytes()).hexdigest())
        return found
    prepare_folder(path.parent)
    content = b"".join(download(file.url))
    found = hashlib.sha256(content).hexdigest()
    if file.sha256:
        file.check(found)
    write_atomic(path, content)
    print(f"{path}: {len(content)} bytes, sha256 {found}")
    return found


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
        return "\n".join(["[[file]]", *(f'{name} = "{value}"' for name, value in values.items())])

    return "\n\n".join(table(vars(file)) for file in files) + "\n"
