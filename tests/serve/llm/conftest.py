"""The embedded language model, once per run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from serve.llm.names import MINI
from serve.llm.speaker import Speaker
from tests.serve.llm.texts import mini_speaker


@pytest.fixture(scope="session")
def mini_llm() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(MINI, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MINI)


@pytest.fixture(scope="session")
def speaker() -> Iterator[Speaker]:
    with mini_speaker() as found:
        yield found
