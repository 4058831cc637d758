"""A hub on loopback: one repository with branches and tags, as huggingface_hub asks for it.

It imitates the public hub's answers to `snapshot_download`. It cannot show the hub's access rights,
redirects to its storage, or large files.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.http_servers import Quiet, serving

REPO = "org/name"


@contextmanager
def hub(
    folder: Path, revisions: Mapping[str, str], repo: str = REPO, port: int = 0
) -> Iterator[tuple[str, list[str]]]:
    """Yield the hub's address and a list of the requests. `revisions` maps names to commits."""
    asked: list[str] = []
    files = {str(p.relative_to(folder)): p for p in sorted(folder.rglob("*")) if p.is_file()}

    class Handler(Quiet):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            asked.append(path)
            if found := re.fullmatch(rf"/api/models/{repo}/(revision|tree)/([^/]+)/?", path):
                self.describe(*found.groups())
            elif found := re.fullmatch(rf"/{repo}/resolve/([^/]+)/(.+)", path):
                self.send(*found.groups())
            else:
                self.answer(404, b"{}")

        do_HEAD = do_GET

        def describe(self, kind: str, revision: str) -> None:
            commit = commit_of(revision)
            if commit is None:
                self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
                return
            if kind == "tree":
                rows = [
                    {"type": "file", "path": name, "size": path.stat().st_size, "oid": oid(path)}
                    for name, path in files.items()
                ]
                self.answer(200, json.dumps(rows).encode())
                return
            siblings = [{"rfilename": name} for name in files]
            facts = {"id": repo, "sha": commit, "siblings": siblings, "private": False}
            self.answer(200, json.dumps(facts).encode())

        def send(self, revision: str, name: str) -> None:
            commit, path = commit_of(revision), files.get(name)
            if commit is None or path is None:
                code = "EntryNotFound" if commit else "RevisionNotFound"
                self.answer(404, b"", {"X-Error-Code": code})
            else:
                headers = {"X-Repo-Commit": commit, "ETag": f'"{oid(path)}"'}
                self.answer(200, path.read_bytes(), headers)

        def answer(self, code: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
            self.send_response(code)
            for key, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    def commit_of(revision: str) -> str | None:
        return revision if revision in revisions.values() else revisions.get(revision)

    def oid(path: Path) -> str:
        return hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest()

    with serving(Handler, port) as url:
        yield url, asked
