"""Requests sent through `langchain-openai`; test_langchain.py judges the answers."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

from tests.serve.service.clients.reports import Call, report

CIRCLE = "a red circle"
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


class Shape(BaseModel):
    name: str


def double_it(number: int) -> int:
    """Twice the number."""
    return 2 * number


def facts_of(message: Any) -> dict[str, Any]:
    reason = message.response_metadata.get("finish_reason")
    return {"text": message.content, "usage": message.usage_metadata, "reason": reason}


def calls(url: str) -> dict[str, Call]:
    common: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
    chat = ChatOpenAI(model="mini-llm", temperature=0, **common)
    counted = ChatOpenAI(model="mini-llm", temperature=0, stream_usage=True, **common)
    short = ChatOpenAI(model="mini-llm", max_tokens=3, seed=1, top_p=0.9, stop=["zzz"], **common)
    text = OpenAI(model="mini-llm", max_tokens=20, temperature=0, **common)

    async def both() -> list[str]:
        chunks = [chunk.content async for chunk in chat.astream(CIRCLE)]
        return ["".join(chunks), (await chat.ainvoke(CIRCLE)).content]

    def talk() -> str:
        turns = [("human", CIRCLE), chat.invoke(CIRCLE), ("human", "make it green")]
        return str(chat.invoke(turns).content)

    return {
        "invoke": lambda: facts_of(chat.invoke([("system", "Be short."), ("human", CIRCLE)])),
        "stream": lambda: [chunk.content for chunk in chat.stream(CIRCLE)],
        "usage": lambda: [chunk.usage_metadata for chunk in counted.stream(CIRCLE)],
        "batch": lambda: [each.content for each in chat.batch([CIRCLE, "a green star"])],
        "async": lambda: asyncio.run(both()),
        "talk": talk,
        "short": lambda: facts_of(short.invoke(CIRCLE)),
        "completion": lambda: text.invoke("a red circle on"),
        "completion stream": lambda: list(text.stream("a red circle on")),
        "tools": lambda: facts_of(chat.bind_tools([double_it]).invoke(CIRCLE)),
        "schema": lambda: str(chat.with_structured_output(Shape).invoke(CIRCLE)),
        "picture": lambda: facts_of(chat.invoke([{"role": "user", "content": [PICTURE]}])),
        "model": lambda: facts_of(ChatOpenAI(model="gpt-4o", **common).invoke(CIRCLE)),
    }


if __name__ == "__main__":
    report(calls(sys.argv[1]))
