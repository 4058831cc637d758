"""The store of `url` results: bounded, expiring, and only its own files."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from sdxl.params import InvalidParams
from serve.errors import Problem
from serve.front.results import ResultStore, check_shared, folder_of, mark
from serve.settings import ServeSettings
from tests.fakes import FakeClock
from tests.isolation import run_alone
from tests.serve.services import ROOT


def test_a_result_is_stored_until_it_expires(tmp_path: Path) -> None:
    clock = FakeClock(time.time())
    store = ResultStore(tmp_path / "r", ttl_s=100, max_bytes=1000, clock=clock)
    name = store.put(b"picture", "png")
    assert store.get(name) == b"picture"
    clock.now += 101
    assert store.get(name) is None
    store.put(b"next", "png")
    assert not (tmp_path / "r" / name).exists(), "expired, and still on disk"


def test_the_store_drops_the_oldest_results_at_its_limit(tmp_path: Path) -> None:
    """There is space for three of eight pictures."""
    store, names = ResultStore(tmp_path, ttl_s=1000, max_bytes=100), []
    for age in range(8, 0, -1):
        store.check_room(30)
        names.append(store.put(bytes(30), "png"))
        path = tmp_path / names[-1]
        os.utime(path, (path.stat().st_atime - age, path.stat().st_mtime - age))
        assert sum(p.stat().st_size for p in tmp_path.iterdir()) <= 100
    assert [store.get(name) is not None for name in names] == [False] * 5 + [True] * 3


def test_what_can_never_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Problem) as caught:
        ResultStore(tmp_path, ttl_s=1000, max_bytes=50).check_room(51)
    assert (caught.value.status, caught.value.code) == (507, "results_full")


def test_names_cannot_be_guessed_or_repeat(tmp_path: Path) -> None:
    store = ResultStore(tmp_path, ttl_s=10, max_bytes=10**6)
    names = {store.put(b"x", "webp") for _ in range(50)}
    assert len(names) == 50 and all(len(name) == 43 + len(".webp") for name in names)


@pytest.mark.parametrize("name", ["../keys.txt", "keys.txt", "", ".", "a" * 43 + ".png/../x"])
def test_only_results_can_be_fetched(tmp_path: Path, name: str) -> None:
    (tmp_path / "keys.txt").write_text("secret")
    assert ResultStore(tmp_path, ttl_s=10, max_bytes=100).get(name) is None


def test_nodes_that_do_not_share_the_folder_are_detected(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    known = mark(one)
    assert mark(one) == known, "deploying again must restart nothing"
    check_shared(str(one), known)
    for elsewhere in (other, tmp_path / "missing"):
        assert elsewhere.name == "missing" or mark(elsewhere) != known
        with pytest.raises(InvalidParams, match="results_dir.*all nodes share"):
            check_shared(str(elsewhere), known)


def test_a_front_whose_node_does_not_share_the_folder_does_not_start(tmp_path: Path) -> None:
    from serve.front.ingress import ImageIngress

    with pytest.raises(InvalidParams, match="results_dir"):
        ImageIngress(ServeSettings(results_dir=str(tmp_path)), [], mark(tmp_path / "other"))


def test_two_processes_may_share_a_folder(tmp_path: Path) -> None:
    one, other = (ResultStore(tmp_path, ttl_s=10, max_bytes=10**6) for _ in range(2))
    assert other.get(one.put(b"shared", "png")) == b"shared"


def test_the_stores_own_folder_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    (folder,) = {folder_of(""), folder_of("")}
    assert folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder.symlink_to(elsewhere)
    with pytest.raises(
        InvalidParams, match="results_dir must be a folder that no other user can write to;"
    ):
        folder_of("")
    monkeypatch.setattr("os.getuid", lambda: 4242)
    (tmp_path / "sdxl-results-4242").mkdir()
    with pytest.raises(InvalidParams, match="results_dir"):
        folder_of("")


def test_a_fitting_picture_lists_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ResultStore(tmp_path, ttl_s=1000, max_bytes=100)
    store.put(bytes(10), "png")
    looked, files = list[int](), store._files

    def look() -> list[tuple[float, int, Path]]:
        looked.append(1)
        return files()

    monkeypatch.setattr(store, "_files", look)
    for _ in range(30):
        store.put(bytes(10), "png")
    assert 0 < len(looked) <= 15, "each time it is full, a tenth is made free"
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) <= 100


STORE = """
import os
from pathlib import Path
from serve.errors import Problem
from serve.front.results import ResultStore

def put(store, size):
    for ask in (lambda: store.check_room(size), lambda: store.put(bytes(size), "png")):
        try:
            ask()
        except Problem as problem:
            print("refused", problem.status, problem.code)

large, small = (ResultStore(Path("results"), 1000, most) for most in (10**9, 100))
names = [large.put(bytes(45_000), "png") for _ in range(20)]
print("newest", large.get(names[-1]) is not None, "oldest", large.get(names[0]) is not None)
put(large, 400_000)
print("left", [path.name for path in Path("results").glob(".*.tmp")])
assert os.system("mount -o remount,ro results") == 0
put(small, 60)
"""


def run_on_small_disk(folder: Path, script: str, timeout_s: float = 60) -> str:
    """Run a script beside results/, a file system of 300 KB; return its output."""
    for name in ("serve", "sdxl", "engines", "onnx_export", "eval"):
        (folder / name).symlink_to(ROOT / name)
    mount = "mkdir results; mount -t tmpfs -o size=300k tmpfs results\n"
    done = run_alone(mount + script, folder, timeout_s)
    logs = "".join(path.read_text() for path in folder.glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    return done.stdout


def test_a_full_and_a_read_only_disk_are_507s(tmp_path: Path) -> None:
    (tmp_path / "store.py").write_text(STORE)
    output = run_on_small_disk(tmp_path, "python store.py")
    assert "newest True oldest False" in output and "left []" in output
    assert output.count("refused 507 results_full") == 2
    assert output.count("refused 507 results_unwritable") == 2


SERVICE = """
sdxl serve --llm none --results-dir "$PWD/results" 2> serve.log & service=$!
until curl -sf -o ready http://127.0.0.1:8000/readyz; do kill -0 $service; sleep 0.5; done
ask() {
  curl -s -o answer.json -w 'status %{http_code} ' http://127.0.0.1:8000/v1/images/generations \
    -H 'content-type: application/json' -d "{\\"prompt\\": \\"noise\\", \\"steps\\": 1,
    \\"guidance_scale\\": 20, \\"deadline_s\\": 100, \\"response_format\\": \\"url\\", \\"n\\": $1}"
}
for _ in 1 2 3 4 5 6 7 8; do ask 1; done
url=$(python -c 'import json; print(json.load(open("answer.json"))["data"][0]["url"])')
curl -s -o picture.png -w 'fetched %{http_code} ' "$url"
ask 10; cat answer.json
kill $service; wait $service
"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_service_lives_with_a_full_disk(tmp_path: Path) -> None:
    """Eight pictures of about 45 KB fill the disk. Then ten at once do not fit."""
    output = run_on_small_disk(tmp_path, SERVICE, 500)
    *ones, ten = re.findall(r"status (\d+) ", output)
    assert ones == ["200"] * 8 and "fetched 200" in output
    assert ten == "507" and "results_full" in output
