"""Turns a text or a chat into token ids with the model's tokenizer and chat template.

Only tokenizers are imported, so that it works in any backend's interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serve import errors
from serve.errors import Problem
from serve.llm.text_orders import Message, TextOrder


class Prompts:
    def __init__(self, model: str | Path) -> None:
        from transformers import AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(str(model))
        self.temperature = temperature_of(str(model))
        """the default that the model's files recommend"""

    def ids(self, order: TextOrder) -> list[int]:
        if isinstance(order.prompt, str):
            ids: list[int] = self.tokenizer(order.prompt).input_ids
        else:
            ids = self.tokenizer(self._rendered(order.prompt), add_special_tokens=False).input_ids
        if not ids:
            raise errors.invalid("prompt", "prompt must have at least one token")
        return ids

    def _rendered(self, messages: Sequence[Message]) -> str:
        from jinja2 import TemplateError

        chat = [{"role": m.role, "content": m.content} for m in messages]
        try:
            text: str = self.tokenizer.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, ValueError) as error:
            # A template raises if it allows no system message, or not this order of roles.
            raise errors.invalid("messages", f"messages: {error}") from error
        return text


def temperature_of(model: str) -> float:
    from transformers import GenerationConfig

    try:
        temperature = GenerationConfig.from_pretrained(model).temperature
    except OSError:
        # Not every model has such a file.
        return 1.0
    return 1.0 if temperature is None else float(temperature)


def room(ids: list[int], order: TextOrder, context: int, longest_prompt: int) -> int:
    """Return how many tokens the answer may have."""
    max_tokens = order.sampling.max_tokens
    param = "prompt" if isinstance(order.prompt, str) else "messages"
    left = context - len(ids)
    if left < 1 or (max_tokens or 1) > left:
        asked = "" if max_tokens is None else f" and asks for {max_tokens} more"
        message = (
            f"The prompt has {len(ids)} tokens{asked}; the model's context holds {context} in all."
        )
        raise Problem(400, message, param, "context_length_exceeded")
    if len(ids) > longest_prompt:
        message = f"The prompt has {len(ids)} tokens; this server reads at most {longest_prompt}."
        raise Problem(400, message, param, "context_length_exceeded")
    return left if max_tokens is None else max_tokens
