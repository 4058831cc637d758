"""The command and the service refuse a long prompt with the same words."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from sdxl.params import MAX_PROMPT_CHARS, GenerationParams, InvalidParams
from sdxl.prompt import MAX_TOKENS
from serve.errors import Problem
from serve.settings import ServeSettings
from serve.worker.worker import Worker
from tests.serve.workers import fake_pipeline, order, updates_of


def refusal(worker: Worker, prompt: str, negative: str = "") -> str:
    with pytest.raises(Problem) as caught:
        asyncio.run(updates_of(worker, order(prompt, negative_prompt=negative)))
    assert caught.value.status == 400
    return caught.value.message


def test_two_thousand_words_have_the_same_length_everywhere(worker: Worker) -> None:
    """The limits differ, because the service leaves room for other requests."""
    prompt = "word " * 2000
    assert len(prompt) <= ServeSettings().max_prompt_chars == MAX_PROMPT_CHARS
    with pytest.raises(InvalidParams) as caught:
        fake_pipeline().check(GenerationParams(prompt, seed=1))
    message = "prompt must have at most {} tokens, got 6000"
    assert str(caught.value) == message.format(1200)
    assert refusal(worker, prompt) == message.format(225)


def test_what_is_a_little_too_long_is_counted_too(worker: Worker) -> None:
    assert "prompt must have at most 225 tokens, got 226" in refusal(worker, "ring " * 226)
    found = refusal(worker, "a ring", "ring " * 300)
    assert found == "negative_prompt must have at most 225 tokens, got 300"


def test_a_service_takes_no_longer_prompts_than_its_engines(worker: Worker) -> None:
    """This holds for any setting, because TensorRT's engines are built for three chunks."""
    pipeline = replace(worker.pipeline, engines=replace(worker.pipeline.engines, most_chunks=3))
    assert Worker(pipeline, max_prompt_tokens=MAX_TOKENS).max_prompt_tokens == 225
    assert Worker(pipeline, max_prompt_tokens=100).max_prompt_tokens == 150
    assert Worker(worker.pipeline, max_prompt_tokens=MAX_TOKENS).max_prompt_tokens == MAX_TOKENS
