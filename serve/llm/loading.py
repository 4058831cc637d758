"""Makes a speaker from settings: the model, its backend and its engine."""

from __future__ import annotations

from serve.llm import options as options_
from serve.llm.engine import LlmEngine
from serve.llm.names import MINI, id_of
from serve.llm.prompts import Prompts
from serve.llm.speaker import Speaker
from serve.settings import ServeSettings


def load(settings: ServeSettings) -> Speaker:
    """Load the model. `llm_backend` must not be `auto`."""
    folder = str(MINI) if settings.llm == "mini" else settings.llm
    backend = settings.llm_backend
    options = options_.read(settings.llm_options, backend)
    prompts = Prompts(folder)
    if backend == "transformers":
        from serve.llm import transformers_engine

        rows, context = options.get("max_batch_size"), options.get("max_seq_len")
        engine: LlmEngine = transformers_engine.load(folder, prompts.tokenizer, rows, context)
    else:
        from serve.llm import trtllm_engine

        engine = trtllm_engine.load(folder, options, settings.llm_start_s)
    return Speaker(id_of(settings.llm), prompts, engine, settings.queue)
