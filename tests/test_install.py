"""`make setup` passes pip's settings to uv."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

PLACE = Path(__file__).parents[1] / ".ci" / "install.py"
LISTED = """\
:env:.find-links='/wheels'
:env:.timeout='60'
global.cert='/certificates.pem'
global.extra-index-url='file:///one file:///two'
global.find-links='/older'
global.index-url='https://packages.example/simple'
list.index-url='https://elsewhere.example/simple'
"""


@pytest.fixture(scope="module")
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", PLACE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_uv_uses_pips_indexes(install: ModuleType) -> None:
    flags = install.uv_flags(install.pip_settings(LISTED))
    assert flags[:-2] == [
        *("--default-index", "https://packages.example/simple"),
        *("--index", "file:///one", "--index", "file:///two"),
        *("--find-links", "/wheels"),
    ]


def test_without_settings_uv_gets_no_index(install: ModuleType) -> None:
    assert install.uv_flags(install.pip_settings("")) == ["--index-strategy", "unsafe-best-match"]


def test_uv_uses_pips_certificates(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    environment = install.environment(install.pip_settings(LISTED))
    assert environment["SSL_CERT_FILE"] == "/certificates.pem"


def test_pytorchs_index_is_queried_even_if_pytorch_is_installed(
    install: ModuleType, tmp_path: Path
) -> None:
    """The double of uv accepts installed packages and reaches no index."""
    uv = tmp_path / "uv"
    uv.write_text('#!/bin/sh\ncase "$*" in *--reinstall*) exit 2 ;; esac\n')
    uv.chmod(0o755)
    assert not install.can_choose_torch([str(uv), "pip", "install"])


@pytest.mark.parametrize("has_uv", [True, False])
def test_pip_installs_if_uv_cannot(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_uv: bool
) -> None:
    """uv is missing or fails."""
    uv, pip = tmp_path / "uv", tmp_path / "python"
    uv.write_text("#!/bin/sh\nexit 2\n")
    pip.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/said\n')
    for each in (uv, pip):
        each.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(pip))
    monkeypatch.setattr(install, "find_uv", lambda: str(uv) if has_uv else None)
    assert install.main(["-e", "."]) == 0
    assert (tmp_path / "said").read_text().splitlines()[-1] == "-m pip install -e ."
