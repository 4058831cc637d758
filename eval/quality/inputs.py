"""The task, the source of pictures and the exact pictures that the flags of `sdxl eval` name."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sdxl.arguments import Parser, given_params

if TYPE_CHECKING:
    from eval.quality.sources import Source
    from eval.quality.task import QualityTask
    from sdxl.checkpoint import Checkpoint
    from sdxl.pipeline import Pipeline

EXACT = "exact"
FEWEST = 2
"""the fewest pictures for a covariance"""
LOADED = ("backend", "precision", "engines", "takes_unchecked")
"""flags of engines that a command loads"""
BENCHMARK_FILES = {
    "captions": "the benchmark's captions_source.tsv",
    "inception": "pt_inception-2015-12-05-6726825d.pth",
    "clip": "the folder of openai/clip-vit-base-patch32",
    "statistics": "val2014.npz",
}


def add_benchmark_files(parser: Parser) -> None:
    files = parser.add_argument_group("MLPerf's task, for real weights (docs/evaluation.md)")
    for name, text in BENCHMARK_FILES.items():
        files.add_argument(f"--{name}", metavar="FILE", help=text)


def read_task(options: argparse.Namespace) -> tuple[QualityTask, Checkpoint]:
    from eval.quality.task import benchmark_task, embedded_task
    from sdxl.checkpoint import MINI, find

    checkpoint, given = find(options.model), given_params(options)
    files = {name: getattr(options, name) for name in BENCHMARK_FILES}
    if checkpoint.folder == MINI and not any(files.values()):
        return embedded_task(given, options.count), checkpoint
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return benchmark_task(checkpoint, given, options.count, files, device), checkpoint


def read_source(options: argparse.Namespace, task: QualityTask, checkpoint: Checkpoint) -> Source:
    from eval.quality.accuracy_log import AccuracyLog
    from eval.quality.sources import Folder, Painted, Service

    if options.images:
        return Folder(Path(options.images), task)
    if options.accuracy_log:
        return AccuracyLog(Path(options.accuracy_log), task)
    if options.url:
        return Service(options.url, task.requests)
    return Painted(load_pipeline(options, options.precision), task.requests)


def load_pipeline(
    options: argparse.Namespace, precision: str | None, *, is_deterministic: bool = False
) -> Pipeline:
    import engines

    return engines.load(
        options.model,
        options.backend,
        precision=precision,
        is_deterministic=is_deterministic,
        folder=options.engines,
        takes_unchecked=options.takes_unchecked,
    )


def read_exact(options: argparse.Namespace, task: QualityTask) -> Source | None:
    from eval.quality.sources import Folder

    if options.against == EXACT:
        return exact(options.model, task)
    return Folder(Path(options.against), task) if options.against else None


def exact(model: str, task: QualityTask) -> Source:
    """The source of exact pictures: every step deep, float32, the same seeds."""
    import engines
    from eval.quality.sources import Painted

    # On a CPU the embedded model's fp32 graphs are faster than PyTorch, with equal results.
    backend = "onnxruntime" if model == "mini" else "torch"
    pipeline = engines.load(model, backend, precision="fp32")
    requests = [replace(r, cache_interval=1, deep_steps=None) for r in task.requests]
    return Painted(pipeline, requests)
