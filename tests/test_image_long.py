"""The image is built from the Dockerfile by buildah and run. It is based on Debian instead of
NVIDIA's base, has Debian's Python, and uses constraints.txt, because locks/ is for another Python.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools import ROOT, tool

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
EXTRAS = "[serve,export,eval,c2pa,s3,tensorrt-rtx]"
WHEELS = "/mnt/wheels"
REPLACED = {
    "python3.12": PYTHON,
    # buildah 1.28 supports neither a stage named by an argument nor this flag.
    "FROM ${KIND}": "FROM gpu",
    " --start-interval=2s": "",
}
PIP = f"/opt/sdxl/bin/pip install -q --no-index --find-links {WHEELS}"
INSTALL = (
    f"RUN {PYTHON} -m venv /opt/sdxl && {PIP} -U setuptools"
    f" && {PIP} --no-build-isolation '.{EXTRAS}'"
)
USED = """
test "$(id -u)" = 10001
! touch /opt/sdxl/a 2> /dev/null
cd /var/lib/sdxl
sdxl render "a red circle" --out a.png
test -s a.png
sdxl serve --port 8391 --llm none &
service=$!
until python -c 'import urllib.request as w; w.urlopen("http://127.0.0.1:8391/readyz", timeout=5)'
do kill -0 $service; sleep 1; done 2> /dev/null
kill $service
wait $service
echo ended well
"""


class Buildah:
    def __init__(self, folder: Path) -> None:
        places = ("--root", str(folder / "store"), "--runroot", str(folder / "run"))
        self.command = (tool("buildah", "buildah"), *places)

    def __call__(self, *arguments: str) -> str:
        done = subprocess.run(
            [*self.command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=3000
        )
        assert done.returncode == 0, f"{arguments}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout.strip()


@pytest.fixture
def buildah(tmp_path: Path) -> Iterator[Buildah]:
    if os.geteuid():
        pytest.skip("only root may make namespaces")
    found = Buildah(tmp_path)
    yield found
    # The mounts are below tmp_path.
    found("rm", "--all")
    found("rmi", "--all", "--force")


def test_the_image_is_built_and_serves_as_its_user(tmp_path: Path, buildah: Buildah) -> None:
    buildah("tag", debian(tmp_path / "debian", buildah), "localhost/debian")
    wheels = tmp_path / "wheels"
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "-w", str(wheels), "-c", "constraints.txt")
    subprocess.run([*pip, f".{EXTRAS}", "setuptools"], cwd=ROOT, check=True, timeout=1500)
    for own in wheels.glob("sdxl_deepcache-*"):
        own.unlink()
    text = (ROOT / "Dockerfile").read_text()
    for old, new in REPLACED.items():
        assert old in text
        text = text.replace(old, new)
    text, count = re.subn("^RUN make setup.*$", INSTALL, text, flags=re.M)
    assert count == 1
    (tmp_path / "Dockerfile").write_text(text)
    build = ("build", "--isolation", "chroot", "--pull-never", "--volume", f"{wheels}:{WHEELS}:ro")
    base = ("--build-arg", "BASE=localhost/debian")
    buildah(*build, *base, "-t", "localhost/sdxl", "-f", str(tmp_path / "Dockerfile"), str(ROOT))
    container = buildah("from", "--pull-never", "localhost/sdxl")
    output = buildah("run", "--isolation", "chroot", container, "--", "sh", "-euc", USED)
    assert output.endswith("ended well"), output


def debian(folder: Path, buildah: Buildah) -> str:
    """Make an image of the Debian that runs here; return its id."""
    release = Path("/etc/os-release").read_text()
    (suite,) = re.findall(r"^VERSION_CODENAME=(\w+)$", release, re.M)
    targets = subprocess.run(
        [tool("apt-get", "apt"), "indextargets", "--format", "$(REPO_URI)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    bootstrap = (tool("debootstrap", "debootstrap"), "--variant=minbase", suite)
    subprocess.run([*bootstrap, str(folder), targets[0]], check=True, timeout=1500)
    container = buildah("from", "scratch")
    buildah("copy", "--quiet", container, str(folder), "/")
    return buildah("commit", "--quiet", "--rm", container)
