"""OpenAI's chat and completions APIs as data: requests, the orders that they become, and answers.

It knows no HTTP server.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from sdxl.params import MAX_SEED
from serve.errors import invalid
from serve.front.openai_images import Reply, RequestModel
from serve.llm.text_orders import Message, Sampling, TextOrder
from serve.models import check_model
from serve.settings import ServeSettings

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for /v1/completions."""
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Neutral = Annotated[Any, Field(description="accepted; has no effect")]


class TextPart(RequestModel):
    type: Literal["text"]
    text: str


class ChatMessage(RequestModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]
    name: str | None = None
    # Fields of an answer that a client sends back to continue the chat.
    refusal: Neutral = None
    annotations: Neutral = None
    tool_calls: None = None
    function_call: None = None
    audio: None = None

    @field_validator("content", mode="before")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        """Refuse parts that are not text; the error of pydantic's union would say less."""
        for part in value if isinstance(value, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                message = "a part of type {kind} is not possible; this model reads text"
                raise PydanticCustomError("not_text", message, {"kind": repr(kind[:40])})
        return value

    def plain(self) -> Message:
        text = self.content
        if not isinstance(text, str):
            text = "".join(part.text for part in text)
        # In chat templates the role `developer` is `system`.
        return Message("system" if self.role == "developer" else self.role, text)


class JsonSchema(RequestModel):
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(RequestModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def schema_text(self) -> str | None:
        if self.type == "text":
            return None
        if self.type == "json_object":
            return "{}"
        if self.json_schema is None:
            raise invalid("response_format", "response_format needs json_schema with this type")
        return json.dumps(self.json_schema.schema_)


class StreamOptions(RequestModel):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class TextRequest(RequestModel):
    """Fields of both routes."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED, description="choice i uses seed + i")] | None = (
        None
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2, description="only 0")] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2, description="only 0")] | None = None
    user: Annotated[str | None, Field(description="accepted; not stored")] = None
    deadline_s: Annotated[float, Field(gt=0, description="seconds")] | None = None

    @property
    def has_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def _sampling(self, limit: int | None, seed: int, schema: str | None = None) -> Sampling:
        return Sampling(
            max_tokens=limit,
            temperature=self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=seed,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            json_schema=schema,
        )


class ChatRequest(TextRequest):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    store: Neutral = None
    metadata: Neutral = None
    service_tier: Neutral = None
    reasoning_effort: Neutral = None
    safety_identifier: Neutral = None
    prompt_cache_key: Neutral = None

    @property
    def has_logprobs(self) -> bool:
        return bool(self.logprobs or self.top_logprobs)

    def text_orders(self, first_seed: int, deadline_s: float) -> list[TextOrder]:
        schema = self.response_format.schema_text() if self.response_format else None
        messages = tuple(message.plain() for message in self.messages)
        limit = self.max_completion_tokens or self.max_tokens
        return [
            TextOrder(messages, self._sampling(limit, first_seed + i, schema), deadline_s)
            for i in range(self.n or 1)
        ]


class CompletionRequest(TextRequest):
    prompt: str | Annotated[list[str], Field(min_length=1, max_length=128)]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    suffix: str | None = None

    @property
    def has_logprobs(self) -> bool:
        return self.logprobs is not None

    def text_orders(self, first_seed: int, deadline_s: float) -> list[TextOrder]:
        prompts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        limit = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        return [
            TextOrder(prompt, self._sampling(limit, first_seed + i), deadline_s)
            for prompt in prompts
            for i in range(self.n or 1)
        ]


def check(request: ChatRequest | CompletionRequest, model: str, settings: ServeSettings) -> None:
    """Raise Problem for a request that this service does not allow or cannot serve."""
    check_model(request.model, model, settings)
    if request.n is not None and request.n > settings.max_n:
        raise invalid("n", f"n must be at most {settings.max_n}, got {request.n}")
    if request.has_logprobs:
        raise invalid("logprobs", "logprobs: the model's backend does not give them")
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "stream_options needs stream to be true")
    neutral_values: dict[str, Any] = {"presence_penalty": 0, "frequency_penalty": 0}
    neutral_values |= {"echo": False, "suffix": None, "best_of": 1}
    for field, neutral in neutral_values.items():
        value = getattr(request, field, None)
        if value is not None and value != neutral:
            raise invalid(field, f"{field}: {value!r} is not possible here; leave it out")


class TextUsage(Reply):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class AnswerMessage(Reply):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(Reply):
    index: int
    message: AnswerMessage
    logprobs: None = None
    finish_reason: Literal["stop", "length"]


class TextChoice(Reply):
    index: int
    text: str
    logprobs: None = None
    finish_reason: Literal["stop", "length"]


class ChatResponse(Reply):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TextUsage


class CompletionResponse(Reply):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: TextUsage
