"""The image's locks: hashes of all requirements in pyproject.toml, with CI's versions."""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.dockerfile import ROOT, arguments

BACKENDS = ("tensorrt", "tensorrt-rtx")
LOCKS = (*BACKENDS, "llm")
# The values of markers in the image.
IMAGE = {
    "python_version": "3.12",
    "python_full_version": "3.12.3",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
}
ENTRY = re.compile(
    r"^(\S+?)(?:\[.*\])?==(\S+)(?: ; .*)? \\\n((?:    --hash=sha256:\w{64}(?: \\)?\n)+)", re.M
)


def locked(backend: str) -> dict[str, str]:
    text = (ROOT / "locks" / f"{backend}.txt").read_text()
    found: dict[str, str] = {
        canonicalize_name(name): version for name, version, _ in ENTRY.findall(text)
    }
    lines = [line for line in text.splitlines() if line[:1] not in ("#", " ", "")]
    assert len(found) == len(lines), "every package is pinned and has a hash"
    return found


def constrained() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if "==" in line)
    return {canonicalize_name(name): version for name, version in pairs}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_lock_holds_every_requirement_of_the_image(backend: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    facts, versions = project["project"], locked(backend)
    asked = [*facts["dependencies"], *project["build-system"]["requires"]]
    for extra in (*image_extras(), backend):
        asked += facts["optional-dependencies"][extra]
    for text in asked:
        wanted = Requirement(text)
        if wanted.marker is None or wanted.marker.evaluate(IMAGE):
            found = versions.get(canonicalize_name(wanted.name))
            assert found is not None, f"{wanted} is not in the lock; needed: make lock"
            assert wanted.specifier.contains(found, prereleases=True), (
                f"needs {wanted}, got {found}"
            )


def image_extras() -> list[str]:
    """Extras of the image's package, without backends."""
    (text,) = (rest for rest in arguments("RUN") if rest.startswith("make setup"))
    (extras,) = re.findall(r"\.\[(.*?)\]", text)
    return [name for name in extras.split(",") if name != "${BACKENDS}"]


def test_make_lock_and_the_image_name_the_same_extras() -> None:
    (line,) = re.findall(r"^IMAGE_EXTRAS := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert line.split() == image_extras()


def test_the_language_models_interpreter_has_the_clusters_ray() -> None:
    assert len({locked(name)["ray"] for name in LOCKS}) == 1


@pytest.mark.parametrize("backend", LOCKS)
def test_a_lock_has_the_tested_versions(backend: str) -> None:
    tested = constrained()
    other = {
        name: (version, tested[name])
        for name, version in locked(backend).items()
        if name in tested and tested[name] != version
    }
    assert not other, f"{other} (locked, constraints.txt); needed: make lock"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_installed_by_hand_has_the_images_version(backend: str) -> None:
    own = {name: each for name, each in locked(backend).items() if name.startswith("tensorrt")}
    assert backend in own
    missing = own.items() - constrained().items()
    assert not missing, f"{missing} are not in constraints.txt"


def test_commands_that_install_a_backend_use_the_constraints() -> None:
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    commands = [
        line
        for document in documents
        for line in document.read_text(encoding="utf-8").splitlines()
        if re.search(r"pip install .*\[.*tensorrt", line)
    ]
    assert commands
    assert all("-c constraints.txt" in line for line in commands), commands


@pytest.mark.parametrize("backend", LOCKS)
def test_a_lock_names_no_index(backend: str) -> None:
    text = (ROOT / "locks" / f"{backend}.txt").read_text()
    assert not re.search(r"://|--(extra-)?index-url|--find-links|@ ", text)


def test_locks_of_several_backends_install_together() -> None:
    first, second = map(locked, BACKENDS)
    assert all(second[name] == version for name, version in first.items() if name in second)
