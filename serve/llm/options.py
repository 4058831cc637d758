"""How a language model's backend runs, from a TOML file in TensorRT-LLM's own names.

The transformers backend takes two of them; a name that is not known, or that a backend does not
have, is an error that names it.
"""

from __future__ import annotations

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
"""What the service decides itself."""
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
    _known(values, allowed, f"of the backend {backend}")
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
            _known(value, tables[name][1], f"of {name}")
    if SPECULATIVE in values:
        _check_speculative(values[SPECULATIVE])


def _check_speculative(table: dict[str, Any]) -> None:
    kind = table.get("decoding_type")
    if kind not in trtllm_api.SPECULATIVE:
        field = "speculative_config.decoding_type"
        raise InvalidParams.unknown(field, kind, trtllm_api.SPECULATIVE)
    _known(table, trtllm_api.speculative_names(kind), "of speculative_config")
    if "max_draft_len" not in table:
        raise InvalidParams("speculative_config.max_draft_len", None, "must be a number of tokens")


def _known(values: Iterable[str], allowed: frozenset[str], whose: str) -> None:
    for name in values:
        if name not in allowed:
            listed = ", ".join(sorted(allowed))
            raise InvalidParams("llm_options", name, f"must be a name {whose}: {listed}")


def gpus_of(values: dict[str, Any]) -> int:
    """How many GPUs one replica takes under TensorRT-LLM."""
    parts = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
    count = 1
    for part in parts:
        count *= int(values.get(part, 1))
    return count
