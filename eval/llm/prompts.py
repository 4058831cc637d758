"""What a language model is asked while it is measured: a few words each, unless a file has better.

Speed depends on the lengths of prompts and answers: figures of one file compare with those of the
same file alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from sdxl.arguments import Parser
from sdxl.params import InvalidParams


@dataclass(frozen=True)
class LlmPrompt:
    text: str
    max_tokens: int | None = None
    """of its answer; the measurement's own unless given"""


OWN = tuple(
    LlmPrompt(text)
    for text in (
        "circle",
        "two stars",
        "a red ring on white",
        "small yellow star above a green square",
        "something blue",
        "three crosses",
        "a triangle at the top",
        "a purple square left of an orange circle",
    )
)


def add_prompts_flag(parser: Parser) -> None:
    parser.add_argument(
        "--prompts",
        default="",
        metavar="FILE",
        help="JSON lines of what to ask: text, and max_tokens where an answer has its own "
        "(default: eight of a few words)",
    )


def read_prompts(file: str) -> tuple[LlmPrompt, ...]:
    """Our own where no file is named."""
    if not file:
        return OWN
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
        found = tuple(read_prompt(line) for line in lines if line.strip())
    except (OSError, ValueError, TypeError) as error:
        needed = f'needed JSON lines such as {{"text": "…", "max_tokens": 256}} ({error})'
        raise InvalidParams("prompts", file, needed) from error
    if not found:
        raise InvalidParams("prompts", file, "needed at least one line")
    return found


def read_prompt(line: str) -> LlmPrompt:
    prompt = LlmPrompt(**json.loads(line))
    if not isinstance(prompt.text, str) or not prompt.text:
        raise ValueError(f"text: {prompt.text!r}")
    most = prompt.max_tokens
    if most is not None and (type(most) is not int or most < 1):
        raise ValueError(f"max_tokens: {most!r}")
    return prompt
