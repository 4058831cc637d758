"""Downloads models from the hub: configs, tokenizers, and one variant of each network's weights."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sdxl.checkpoint_checks import CheckpointError

WEIGHT_NAMES = {
    "text_encoder": "model",
    "text_encoder_2": "model",
    "unet": "diffusion_pytorch_model",
    "vae": "diffusion_pytorch_model",
}
"""the stem of the weight files in each network's folder"""
VARIANTS = ("", ".fp16")
"""variants of weights in order of preference: float32, then float16"""
TEXTS = (".json", ".txt")
CONFIG_FOLDERS = ("scheduler", "tokenizer", "tokenizer_2")
TOP = ("model_index.json", "preview.json", "presets.json")
INDEX = ".safetensors.index"


def download(repo: str, revision: str | None) -> Path:
    """Download a snapshot from the hub and return its folder, whose name is the commit."""
    from huggingface_hub import snapshot_download

    with _hub_errors(repo + (f"@{revision}" if revision else "")):
        files = _files_of(repo, revision)
        if files is None and (fetched := _fetched(repo, revision)) is not None:
            return fetched
        return Path(snapshot_download(repo, revision=revision, allow_patterns=files or [*TOP]))


def check_on_hub(model: str, repo: str, revision: str | None) -> None:
    """Raise CheckpointError for a model that is neither on the hub nor downloaded."""
    with _hub_errors(model):
        if _files_of(repo, revision) is None and _fetched(repo, revision) is None:
            raise OSError("the hub does not answer")


@contextmanager
def _hub_errors(model: str) -> Iterator[None]:
    """Convert the hub's errors to a CheckpointError of one line."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        yield
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        line = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"model {model!r} is neither a folder here nor could be fetched: {line}"
        ) from error


def _files_of(repo: str, revision: str | None) -> list[str] | None:
    """List the files to download: one variant of weights. None if the hub does not answer."""
    from huggingface_hub import HfApi
    from huggingface_hub.constants import DEFAULT_REVISION
    from huggingface_hub.errors import (
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        info = HfApi().model_info(repo, revision=revision or DEFAULT_REVISION)
    except (RepositoryNotFoundError, RevisionNotFoundError):
        raise
    except HfHubHTTPError:
        if _fetched(repo, revision) is None:
            raise
        return None
    except Exception:
        # The error's type depends on the library's version. The download will report the error.
        return None
    names = [file.rfilename for file in info.siblings or ()]
    return [glob.escape(name) for name in needed_files(names)]


def _fetched(repo: str, revision: str | None) -> Path | None:
    """Return the folder of a snapshot that was downloaded before."""
    from huggingface_hub import try_to_load_from_cache

    index = try_to_load_from_cache(repo, "model_index.json", revision=revision)
    return Path(index).parent if isinstance(index, str) else None


def needed_files(names: Iterable[str]) -> list[str]:
    """Select the files of a repository that a model needs."""
    listed = sorted(names)
    needed = [name for name in listed if name in TOP or _is_text(name)]
    for folder, stem in WEIGHT_NAMES.items():
        needed += _one_variant(listed, f"{folder}/{stem}")
    return needed


def _is_text(name: str) -> bool:
    folder, _, file = name.rpartition("/")
    is_needed = folder in CONFIG_FOLDERS or folder in WEIGHT_NAMES
    return is_needed and file.endswith(TEXTS) and INDEX not in file


def _one_variant(names: list[str], path: str) -> list[str]:
    for variant in VARIANTS:
        single = f"{path}{variant}.safetensors"
        if single in names:
            return [single]
        index = f"{path}{INDEX}{variant}.json"
        shard = re.compile(rf"{re.escape(path + variant)}-\d+-of-\d+\.safetensors")
        if index in names:
            return [index, *(name for name in names if shard.fullmatch(name))]
    return []
