"""A hub id may name a revision, and a downloaded model is identified by its commit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from sdxl import checkpoint, hub
from sdxl.checkpoint import MINI, CheckpointError, find
from sdxl.hub import WEIGHT_NAMES, needed_files
from tests.sdxl.hub_double import hub as serve_hub

MAIN, TAGGED = "a" * 40, "b" * 40
PROGRAM = """
import sys
from sdxl import cli
from sdxl.checkpoint import find
for model in sys.argv[1:]:
    try:
        found = find(model)
        print(found.name, found.origin, found.sizes.default)
    except Exception as error:
        print(cli.describe(error))
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serve_hub(MINI, {"main": MAIN, "v1.0": TAGGED}) as (url, _):
        yield url


def fetch(address: str, home: Path, *models: str, **environment: str) -> list[str]:
    """This runs in a separate process, because huggingface_hub reads its settings at import."""
    places = {"HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *models],
        env={**os.environ, **places, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_revision_is_fetched_and_identified_by_its_commit(address: str, tmp_path: Path) -> None:
    models = ("org/name", "org/name@v1.0", f"org/name@{TAGGED}", "org/name@gone")
    *found, gone = fetch(address, tmp_path, *models)
    assert found == [
        f"name org/name@{MAIN} 128",
        f"name org/name@{TAGGED} 128",
        f"name org/name@{TAGGED} 128",
    ]
    assert gone.startswith("model 'org/name@gone' is neither a folder here nor could be fetched")
    # A fetched model is found without the hub, by the name that a picture stores.
    again = fetch("http://127.0.0.1:9", tmp_path, f"org/name@{TAGGED}", HF_HUB_OFFLINE="1")
    assert again == [f"name org/name@{TAGGED} 128"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Make a snapshot's folder."""
    made = tmp_path / "snapshots" / MAIN
    made.mkdir(parents=True)
    shutil.copy(MINI / "model_index.json", made)
    return made


@pytest.mark.parametrize(
    ("model", "revision"),
    [("org/name", None), ("org/name@v1.0", "v1.0"), ("org/name@refs/pr/1", "refs/pr/1")],
)
def test_the_hub_is_asked_for_the_revision(
    model: str, revision: str | None, monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    import huggingface_hub

    snapshot, files = Mock(return_value=str(place)), ["unet/config.json"]
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(hub, "_files_of", lambda repo, revision: files)
    assert find(model).origin == f"org/name@{MAIN}"
    snapshot.assert_called_once_with("org/name", revision=revision, allow_patterns=files)


@pytest.mark.parametrize(
    ("kind", "is_fetched", "is_found"),
    [
        ("HfHubHTTPError", True, True),
        ("HfHubHTTPError", False, False),
        ("RepositoryNotFoundError", True, False),
        ("GatedRepoError", True, False),
        ("RevisionNotFoundError", True, False),
    ],
)
def test_a_failing_hub_does_not_stop_a_model_that_was_fetched(
    kind: str, is_fetched: bool, is_found: bool, monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    answer = Mock(headers={}, request=None)
    error = getattr(errors, kind)(f"{kind}: 503 or the like", response=answer)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", Mock(side_effect=error))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked"))
    monkeypatch.setattr(hub, "_fetched", lambda *_: place if is_fetched else None)
    if is_found:
        assert find("org/name").folder == place
        return
    with pytest.raises(CheckpointError, match=f"org/name.* could be fetched: {kind}"):
        find("org/name")


def test_one_variant_of_each_network_is_fetched() -> None:
    """The public hub's SDXL has two variants, a second VAE and other frameworks' files."""
    both = [(f"{part}/{name}", f"{part}/{name}.fp16") for part, name in WEIGHT_NAMES.items()]
    needed = {f"{plain}.safetensors" for plain, _ in both}
    halves = {f"{half}.safetensors" for _, half in both}
    missing, half = (f"unet/diffusion_pytorch_model{x}.safetensors" for x in ("", ".fp16"))
    strays = ["vae_1_0/config.json", "vae_1_0/diffusion_pytorch_model.safetensors"]
    strays += ["unet/model.onnx", "sd_xl_base.safetensors"]
    listed = {*needed, *halves, *strays} - {missing}
    assert {*needed_files(listed)} == needed - {missing} | {half}


SHARDED = [
    "unet/config.json",
    "unet/diffusion_pytorch_model-00001-of-00002.safetensors",
    "unet/diffusion_pytorch_model-00002-of-00002.safetensors",
    "unet/diffusion_pytorch_model.fp16-00001-of-00001.safetensors",
    "unet/diffusion_pytorch_model.safetensors.index.fp16.json",
    "unet/diffusion_pytorch_model.safetensors.index.json",
]


def test_one_variant_of_shards_is_fetched_with_its_index() -> None:
    both, halves = needed_files(SHARDED), needed_files([*SHARDED[:1], *SHARDED[3:5]])
    assert sorted(both) == [*SHARDED[:3], SHARDED[5]]
    assert sorted(halves) == [SHARDED[0], *SHARDED[3:5]]


def test_one_variant_of_a_folder_with_both_is_read(tmp_path: Path) -> None:
    shutil.copytree(MINI, tmp_path, dirs_exist_ok=True)
    unet = tmp_path / "unet" / "diffusion_pytorch_model.safetensors"
    unet.with_name("diffusion_pytorch_model.fp16.safetensors").write_bytes(b"not read")
    found = find(str(tmp_path))
    assert found.weight_files("unet") == [unet]
    assert not [name for name in found.file_digests if "fp16" in name]


@pytest.mark.parametrize("model", ["org/name@", "org/name@@v1", "@v1", "org/name@-x", "org/na me"])
def test_what_is_no_hub_id_is_never_requested(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "download", lambda *_: pytest.fail("asked the hub"))
    with pytest.raises(CheckpointError, match="model must be .mini., a folder"):
        find(model)
