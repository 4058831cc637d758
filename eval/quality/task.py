"""The task of an evaluation: its captions, requests and judges. MLPerf's task is for real weights;
the embedded model has another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eval.quality import protocol
from eval.quality.captions import digest_captions, escape_brackets, read_captions, scene_captions
from eval.quality.clip_scorer import ClipScorer, mini_scorer, vit_b_32
from eval.quality.frechet import Gaussian, read_statistics
from eval.quality.inception import load_inception
from sdxl.checkpoint import Checkpoint
from sdxl.digests import sha256_of
from sdxl.images import Pixels
from sdxl.mini.scenes import draw, sample_scene
from sdxl.params import GenerationParams, InvalidParams
from sdxl.prompt import BODY

MINI_PICTURES, MINI_SIDE = 1000, 128
REFERENCE_PICTURES, REFERENCE_SEED = 2000, 1
BATCH = 50
"""pictures in one call of a scorer"""

Features = Callable[[Sequence[Pixels]], Tensor]


@dataclass(frozen=True)
class QualityTask:
    """`requests[i]` is the request for `captions[i]`. `load` loads the judges."""

    name: str
    note: str
    """what the scores can be compared with"""
    captions: tuple[str, ...]
    requests: tuple[GenerationParams, ...]
    side: int
    load: Callable[[], Judges]
    judge: str
    """digest of the judges' weights"""
    clip_gate: protocol.ScoreRange | None = None
    fid_gate: protocol.ScoreRange | None = None

    def as_dict(self) -> dict[str, Any]:
        first = {k: v for k, v in self.requests[0].as_dict().items() if k != "prompt"}
        return {
            "task": self.name,
            "pictures": len(self.captions),
            "captions": digest_captions(self.captions),
            "judge": self.judge,
            "request": first,
        }


@dataclass(frozen=True)
class Judges:
    """Features for FID, a CLIP, and the statistics of real pictures."""

    features: Features
    clip: ClipScorer
    reference: Gaussian


def embedded_task(given: dict[str, Any], count: int | None) -> QualityTask:
    """Scenes outside the training set, scored by the embedded model's CLIP."""
    from sdxl.mini.clip import WEIGHTS

    for side in ("width", "height"):
        if given.get(side, MINI_SIDE) != MINI_SIDE:
            raise InvalidParams(side, given[side], f"must be {MINI_SIDE}, which its scorer takes")
    captions = scene_captions(count or MINI_PICTURES)
    weights = (WEIGHTS / tower / "model.safetensors" for tower in ("vision", "text"))
    first, usual = given.get("seed", 0), GenerationParams(**given)
    usual = replace(usual, cache_interval=usual.interval)
    return QualityTask(
        "embedded model, drawn scenes",
        "FID and CLIP are of the embedded model's own small CLIP, against drawn scenes: compare "
        "them with each other, never with published figures",
        tuple(captions),
        tuple(replace(usual, seed=first + i, prompt=caption) for i, caption in enumerate(captions)),
        MINI_SIDE,
        mini_judges,
        "-".join(sha256_of(path)[:8] for path in weights),
    )


def mini_judges(pictures: int | None = None) -> Judges:
    clip = mini_scorer()
    drawn = (clip.pooled(batch) for batch in drawn_scenes(pictures or REFERENCE_PICTURES))
    return Judges(clip.pooled, clip, Gaussian.of(drawn))


def drawn_scenes(count: int) -> Iterator[list[Pixels]]:
    """Drawn scenes of the captions' distribution."""
    rng = np.random.default_rng(REFERENCE_SEED)
    scenes = (sample_scene(rng, held_out=True) for _ in range(count))
    drawn = (draw(scene, int(rng.integers(2**31))) for scene in scenes)
    while batch := list(islice(drawn, BATCH)):
        yield batch


def benchmark_task(
    checkpoint: Checkpoint,
    given: dict[str, Any],
    count: int | None,
    files: dict[str, str | None],
    device: str,
) -> QualityTask:
    """MLPerf's task, with its gates if no parameter was changed."""
    paths = _existing(files)
    captions = read_captions(paths["captions"])
    if len(captions) < (count or protocol.CAPTIONS):
        needed = f"must hold {count or protocol.CAPTIONS} captions"
        raise InvalidParams("captions", str(paths["captions"]), f"{needed}; found {len(captions)}")
    _check_scheduler(checkpoint)
    captions = captions[: count or protocol.CAPTIONS]
    request = replace(protocol.REQUEST, **given)
    if request.width != request.height:
        needed = f"must equal the width, {request.width}: its scorers take squares"
        raise InvalidParams("height", request.height, needed)
    changed = [n for n, v in given.items() if v != getattr(protocol.REQUEST, n)]
    changed += ["count"] if len(captions) != protocol.CAPTIONS else []
    is_closed = not [name for name in changed if name != "cache_interval"]
    # Load now, so that wrong weights are reported before any picture is made.
    reference = read_statistics(paths["statistics"], protocol.INCEPTION_WIDTH)
    inception = load_inception(paths["inception"]).to(device)
    clip = vit_b_32(paths["clip"], device)
    towers = sorted(paths["clip"].glob("*.safetensors"))

    @torch.inference_mode()
    def features(pictures: Sequence[Pixels]) -> Tensor:
        batch = torch.from_numpy(np.stack(pictures)).movedim(-1, 1).to(device)
        return torch.cat([inception(part).cpu() for part in batch.split(BATCH)])

    note = f"changed: {', '.join(changed)}; " if changed else ""
    if count_long := sum(len(checkpoint.tokenizers[0].encode(c)) > BODY for c in captions):
        note += f"{count_long} captions have more than {BODY} tokens, and are not cut off; "
    return QualityTask(
        "MLPerf Inference, text to image",
        note + ("the benchmark's gates apply" if is_closed else "its gates do not apply"),
        tuple(captions),
        tuple(replace(request, prompt=escape_brackets(caption)) for caption in captions),
        request.width or 0,
        lambda: Judges(features, clip, reference),
        "".join(sha256_of(p)[:16] for p in (paths["inception"], paths["statistics"], *towers)),
        protocol.CLIP_GATE if is_closed else None,
        protocol.FID_GATE if is_closed else None,
    )


def _existing(files: dict[str, str | None]) -> dict[str, Path]:
    paths = {}
    for field, name in files.items():
        if name is None:
            raise InvalidParams(field, None, "must be given for this model; see docs/evaluation.md")
        if not Path(name).exists():
            raise InvalidParams(field, name, "must be an existing file or folder")
        paths[field] = Path(name)
    return paths


def _check_scheduler(checkpoint: Checkpoint) -> None:
    for key, needed in protocol.SCHEDULER.items():
        value = getattr(checkpoint.scheduler, key)
        if value != needed:
            shown = f"{checkpoint.name} with {key} {value!r} in its scheduler"
            raise InvalidParams("model", shown, f"must have {needed!r} for the benchmark")
