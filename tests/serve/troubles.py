"""Cause the messages of docs/troubleshooting.md that the service sends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from sdxl.params import InvalidParams
from serve.batch.progress import BatchProgress
from serve.batch.running import describe, print_resume_hint
from serve.cli import check_port
from serve.errors import Problem
from serve.front.api import create_app
from serve.settings import ServeSettings
from serve.worker.worker import Worker
from tests.fakes import FakeClock
from tests.serve.batch.drawers import order_of, prompts
from tests.serve.servers import GENERATE, client, client_of, file_of_keys
from tests.serve.workers import fake, fake_pipeline, order, picture_of, running
from tests.troubles import Cause, Trouble

PROMPT = "a green star"
Send = Callable[[httpx.AsyncClient], Any]


def answered(send: Send, broken_engine: str = "", **settings: Any) -> Cause:
    """Return a function that sends the request and returns the answer's status and message."""

    def cause(_: Trouble) -> str:
        async def scenario() -> str:
            with running() as worker:
                if broken_engine:
                    fake(worker.pipeline, broken_engine).fault = RuntimeError("out of memory")
                async with client(worker, **settings) as http:
                    return status_and_message(await send(http))

        return asyncio.run(scenario())

    return cause


def status_and_message(answer: httpx.Response) -> str:
    return f"{answer.status_code} {answer.json()['error']['message']}"


def generate(path: str = GENERATE, **body: Any) -> Send:
    return lambda http: http.post(path, json={"prompt": PROMPT, "steps": 2, **body})


def edit_of_nothing(http: httpx.AsyncClient) -> Any:
    return http.post("/v1/images/edits", data={"prompt": PROMPT}, files={"image": b"<svg/>"})


def without_key(trouble: Trouble) -> str:
    keys = file_of_keys(trouble.folder, right="ann")
    return answered(lambda http: http.get("/v1/models"), keys=keys)(trouble)


def after_the_deadline(_: Trouble) -> str:
    pipeline, clock = fake_pipeline(), FakeClock()

    def take_long() -> None:
        clock.now += 100

    with running(replace(pipeline, clock=clock)) as worker, pytest.raises(Problem) as caught:
        fake(pipeline, "unet_deep").on_call = take_long
        asyncio.run(picture_of(worker, order(deadline_s=60)))
    return f"{caught.value.status} {caught.value}"


def with_too_many_requests(_: Trouble) -> str:
    async def scenario() -> str:
        with running(fake_pipeline(tick_s=0.02), queue=1) as worker:
            async with client(worker) as http:
                body = {"prompt": PROMPT, "steps": 20, "deadline_s": 60}
                answers = await asyncio.gather(*(http.post(GENERATE, json=body) for _ in range(12)))
        return status_and_message(next(answer for answer in answers if answer.status_code != 200))

    return asyncio.run(scenario())


def while_loading(_: Trouble) -> str:
    async def scenario() -> str:
        app = create_app([Worker(fake_pipeline())], ServeSettings())
        async with client_of(app) as http:
            return status_and_message(await http.get("/readyz"))

    return asyncio.run(scenario())


def on_a_taken_port(_: Trouble) -> str:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(InvalidParams) as caught:
            check_port("127.0.0.1", other.getsockname()[1])
    return str(caught.value)


def in_the_folder_of_another_job(trouble: Trouble) -> str:
    source, out = prompts(trouble.folder, 1), trouble.folder / "out"
    job, other = (describe(order_of(source, out, "--steps", steps)) for steps in ("2", "3"))
    with pytest.raises(InvalidParams) as caught:
        job.check_same(other)
    return str(caught.value)


def interrupted(trouble: Trouble) -> str:
    order = order_of(prompts(trouble.folder, 1), trouble.folder / "out")
    print_resume_hint(BatchProgress(rows=4, began_s=0.0, made=3), order)
    return trouble.capture.readouterr().err


def with_another_certificate(trouble: Trouble) -> str:
    pytest.importorskip("c2pa")
    from sdxl.content_credentials import _new_certificate
    from sdxl.provenance import C2PA, Provenance

    chain = trouble.file("chain.pem", _new_certificate()[0])
    key = trouble.file("key.pem", _new_certificate()[1])
    with pytest.raises(InvalidParams) as caught:
        _ = Provenance(C2PA, chain, key).sign
    return str(caught.value)


SERVED: dict[str, Cause] = {
    "a client's base URL": answered(generate("/images/generations")),
    "/sdapi/v1/txt2img": answered(generate("/sdapi/v1/txt2img")),
    "The model 'gpt-image-1'": answered(generate(model="gpt-image-1")),
    "Files, batches and jobs are off": answered(lambda http: http.get("/v1/files")),
    "There is no such result": answered(lambda http: http.get("/v1/results/gone.png")),
    "is not a field here": answered(generate(tools=[])),
    "size must be 'auto'": answered(generate(size="1024x1024")),
    "background must be": answered(generate(background="transparent")),
    "prompt must have at most … characters": answered(
        generate(prompt="a " * 200), max_prompt_chars=300
    ),
    "prompt must have at most … tokens": answered(generate(prompt="a " * 400)),
    "must be a PNG, JPEG or WEBP": answered(edit_of_nothing),
    "A valid API key": without_key,
    "is not a name of this service": answered(
        lambda http: http.get("/v1/models", headers={"host": "sdxl.example"})
    ),
    "Given up": after_the_deadline,
    "The body is too large": answered(generate(), max_edit_bytes=10),
    "the queue is full": with_too_many_requests,
    "Refused: ready in": answered(generate(deadline_s=0.001)),
    "The engine failed": answered(generate(), broken_engine="unet_prompt"),
    "still loading": while_loading,
    "must be a free port": on_a_taken_port,
    "must be a loopback address": lambda t: t.error_of("serve", "--host", "0.0.0.0"),
    "to resume the job there": in_the_folder_of_another_job,
    "sdxl batch: interrupted": interrupted,
    "must be a certificate chain": with_another_certificate,
}
