"""Downloaded files are checked against their digests, from a server on loopback."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import pytest

from eval.quality.fetch import RECORD, SOURCES, FetchFailed, git_blob_of, main, read_sources
from sdxl.params import InvalidParams
from tests.http_servers import Quiet, serving

CONTENT = {"captions.tsv": b"id\tcaption\n1\ta cat\n", "clip.bin": bytes(range(256)) * 9}
DIGESTS = {name: hashlib.sha256(content).hexdigest() for name, content in CONTENT.items()}


class Files(Quiet, SimpleHTTPRequestHandler):
    """Serves a folder."""


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "site").mkdir()
    for name, content in CONTENT.items():
        (tmp_path / "site" / name).write_bytes(content)
    with serving(partial(Files, directory=str(tmp_path / "site"))) as address:
        yield address


def sources(folder: Path, url: str, **digests: str) -> str:
    path = folder / "mine.toml"
    tables = (
        f'[[file]]\npath = "in/{name}"\nurl = "{url}/{name}"\nsha256 = "{digest}"\n'
        for name, digest in zip(CONTENT, digests.values(), strict=True)
    )
    path.write_text("\n".join(tables))
    return str(path)


def fetch(folder: Path, listed: str, *flags: str) -> Path:
    out = folder / "out"
    assert main(["--out", str(out), "--sources", listed, *flags]) == 0
    return out


def test_files_of_the_right_digest_are_fetched_once(url: str, tmp_path: Path) -> None:
    captions, clip = DIGESTS.values()
    listed = sources(tmp_path, url, captions=captions, clip=clip)
    out = fetch(tmp_path, listed)
    assert {p.name: p.read_bytes() for p in (out / "in").iterdir()} == CONTENT
    for name in CONTENT:
        (tmp_path / "site" / name).unlink()
    assert fetch(tmp_path, listed) == out, "correct files are not downloaded again"
    (out / "in" / "clip.bin").write_bytes(b"other")
    with pytest.raises(FetchFailed, match="clip.bin: has sha256"):
        fetch(tmp_path, listed)


def test_a_file_with_another_digest_is_refused_and_not_stored(url: str, tmp_path: Path) -> None:
    listed = sources(tmp_path, url, captions="0" * 64, clip=DIGESTS["clip.bin"])
    with pytest.raises(FetchFailed, match=f"has sha256 {DIGESTS['captions.tsv']}, expected 0000"):
        fetch(tmp_path, listed)
    assert not list((tmp_path / "out").rglob("*.*"))


def test_unknown_digests_are_recorded_and_then_checked(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = sources(tmp_path, url, captions="", clip=DIGESTS["clip.bin"])
    with pytest.raises(
        InvalidParams,
        match="sources needs a digest of in/captions.tsv; add it in a copy.* --record",
    ):
        fetch(tmp_path, listed)
    assert not (tmp_path / "out").exists()
    recorded = fetch(tmp_path, listed, "--record") / RECORD
    line = next(line for line in capsys.readouterr().out.splitlines() if "captions.tsv" in line)
    assert line.endswith(f"sha256 {DIGESTS['captions.tsv']}; not checked: no digest is known")
    assert [file.sha256 for file in read_sources(recorded)] == list(DIGESTS.values())
    (tmp_path / "out" / "in" / "captions.tsv").unlink()
    (tmp_path / "site" / "captions.tsv").write_bytes(b"id\tcaption\n1\ta dog\n")
    with pytest.raises(FetchFailed, match="captions.tsv: has sha256"):
        fetch(tmp_path, str(recorded))


def test_a_missing_file_is_reported_in_one_line(url: str, tmp_path: Path) -> None:
    listed = sources(tmp_path, url + "/gone", captions="1" * 64, clip="2" * 64)
    with pytest.raises(FetchFailed, match="could not be fetched .*404"):
        fetch(tmp_path, listed)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('path = "../x"\nurl = "https://a/b"', "path must be below the folder .*got '../x'"),
        ('path = "x"\nurl = "http://a/b"', "url must start with https://.*got 'http://a/b'"),
        (
            'path = "x"\nurl = "https://a/b"\nsha256 = "12"',
            "sha256 must be 64 hexadecimal digits, got '12'",
        ),
        ('path = "x"', r"sources must hold TOML with \[\[file\]\] tables of path, url and"),
        ("path = 3", r"sources must hold TOML with \[\[file\]\] tables of path, url and"),
    ],
)
def test_wrong_sources_are_refused(table: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f"[[file]]\n{table}\n")
    with pytest.raises(InvalidParams, match=message):
        read_sources(path)


def test_the_git_blob_id_equals_gits() -> None:
    """`printf 'what is up, doc?' | git hash-object --stdin`, as in the book Pro Git."""
    assert git_blob_of(b"what is up, doc?") == "bd9dbf5aae1a3862dd1526723246b20206e5fc37"


def test_the_git_blob_id_is_checked(url: str, tmp_path: Path) -> None:
    table = f'[[file]]\npath = "clip.bin"\nurl = "{url}/clip.bin"\n'
    right, wrong = tmp_path / "right.toml", tmp_path / "wrong.toml"
    right.write_text(f'{table}git_blob = "{git_blob_of(CONTENT["clip.bin"])}"\n')
    wrong.write_text(f'{table}git_blob = "{git_blob_of(b"other")}"\n')
    with pytest.raises(FetchFailed, match="clip.bin: has git_blob .*, expected"):
        fetch(tmp_path, str(wrong))
    (recorded,) = read_sources(fetch(tmp_path, str(right)) / RECORD)
    assert recorded.sha256 == DIGESTS["clip.bin"], "the record has the sha256 too"


def test_the_built_in_sources_are_immutable() -> None:
    """Each source has a digest, and an address that names a commit or a release."""
    for file in read_sources(SOURCES):
        assert file.has_digest
        assert re.search("/[0-9a-f]{40}/|/releases/download/", file.url), file.url
