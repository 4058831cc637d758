"""Options of a language model's backend, from a TOML file that uses TensorRT-LLM's names.

The transformers backend has two of them. A name that the backend does not have is an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from sdxl.files import read_toml
from sdxl.params import InvalidParams
from serve.llm import trtllm_api

OURS = frozenset(
    {
        "model",
        "tokenizer",
        "tokenizer_mode",
        "skip_tokenizer_init",
        "tokenizer_revision",
        "batched_logits_processor",
        "gpus_per_node",
    }
)
"""Options that the service sets itself."""
OF_TRANSFORMERS = frozenset({"max_batch_size", "max_seq_len"})
SPECULATIVE = "speculative_config"
COUNTS = ("tensor_parallel_size", "pipeline_parallel_size", "max_batch_size", "max_seq_len")


def read(file: str, backend: str) -> dict[str, Any]:
    if not file:
        return {}
    values = read_toml("llm_options", file)
    check(values, backend)
    return values


def check(values: dict[str, Any], backend: str) -> None:
    is_transformers = backend == "transformers"
    allowed = OF_TRANSFORMERS if is_transformers else trtllm_api.llm_names() - OURS
    _check_names(values, allowed, f"of the backend {backend}")
    for name in COUNTS:
        value = values.get(name, 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidParams(name, value, "must be a whole number of at least 1")
    tables = trtllm_api.tables()
    for name, value in values.items():
        is_table = name == SPECULATIVE or name in tables
        if isinstance(value, dict) != is_table:
            needed = "a table" if is_table else "a plain value"
            raise InvalidParams(name, value, f"must be {needed}")
        if name in tables:
            _check_names(value, tables[name][1], f"of {name}")
    if SPECULATIVE in values:
        _check_speculative(values[SPECULATIVE])


def _check_speculative(table: dict[str, Any]) -> None:
    kind = table.get("decoding_type")
    if kind not in trtllm_api.SPECULATIVE:
        field = "speculative_config.decoding_type"
        raise InvalidParams.unknown(field, kind, trtllm_api.SPECULATIVE)
    _check_names(table, trtllm_api.speculative_names(kind), "of speculative_config")
    if "max_draft_len" not in table:
        raise InvalidParams("speculative_config.max_draft_len", None, "must be a number of tokens")


def _check_names(values: Iterable[str], allowed: frozenset[str], owner: str) -> None:
    for name in values:
        if name not in allowed:
            listed = ", ".join(sorted(allowed))
            raise InvalidParams("llm_options", name, f"must be a name {owner}: {listed}")


def gpus_of(values: dict[str, Any]) -> int:
    """Return how many GPUs one replica takes under TensorRT-LLM."""
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
    return math.prod(int(values.get(size, 1)) for size in sizes)
