"""The REST application over any ImageBackends: routes, and the layers around them.

It knows no Ray.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute, Match

import sdxl
from serve import errors
from serve.errors import Problem
from serve.front.a1111 import WITH_PICTURES
from serve.front.access import Access, Hosts, check_operator
from serve.front.answering import EVENTS_IN_OPENAPI
from serve.front.body_limit import BodyLimit
from serve.front.edits import EDITS_PATH, describe_edit_body, read_edit
from serve.front.error_envelope import ErrorEnvelope, Front, refusal
from serve.front.form_routes import MAPS_PATH, add_form_routes
from serve.front.generations import Generations
from serve.front.keys import Keyring, RateLimiter
from serve.front.openai_images import (
    MEDIA,
    UNKNOWN_FIELD,
    ErrorBody,
    ImageLimits,
    ImageRequest,
    ImagesResponse,
    Model,
    ModelAsked,
    ModelDeleted,
    ModelList,
    RunningEngines,
)
from serve.front.page import add_pages
from serve.front.probes import add_probe_routes
from serve.front.request_reader import RequestReader
from serve.front.results import ResultStore, folder_of
from serve.front.sent_pictures import DecodingThread
from serve.front.served_models import ServedModel, ServedModels
from serve.front.text_answers import TextAnswers, add_text_routes
from serve.llm.expansion import Expander
from serve.llm.names import id_of
from serve.llm.text_orders import TextBackend
from serve.models import names_of
from serve.orders import ImageBackend, ModelCard
from serve.run_time_models import ModelPool
from serve.settings import ServeSettings
from serve.tracing import tracer_to

log = logging.getLogger(__name__)

ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "the request is wrong"},
    "5XX": {"model": ErrorBody, "description": "the server cannot serve it now"},
}
GENERATIONS_PATH = "/v1/images/generations"
FILES_PATH, BATCHES_PATH, JOBS_PATH = "/v1/files", "/v1/batches", "/v1/images/jobs"
AddRoutes = Callable[[FastAPI, RequestReader, ServeSettings], None]
OFF = {"/sdapi/": "sdapi", "/controlnet/": "sdapi", "/v1/chat/": "llm", "/v1/completions": "llm"}
"""Paths that need a setting. Files, batches and jobs have routes for this error."""
TAGS = {
    **dict.fromkeys(("/v1/images", "/v1/results"), "Pictures"),
    **dict.fromkeys(("/v1/files", "/v1/batches"), "Batches"),
    **dict.fromkeys(("/v1/chat", "/v1/completions"), "Text"),
    **dict.fromkeys(("/sdapi", "/controlnet"), "stable-diffusion-webui"),
    "/v1/models": "Models",
    "/": "Service",
}
"""Groups of routes in /docs, by the first prefix that matches."""
NO_OBJECT = ("model_type", "model_attributes_type", "dict_type")
"""Pydantic's error types for a body that is not a JSON object."""
GENERATED: dict[int | str, dict[str, Any]] = {
    200: {
        "model": ImagesResponse,
        "content": {**EVENTS_IN_OPENAPI, **{kind: {} for kind in MEDIA.values()}},
        "description": "the pictures; as events with `stream`; "
        "with `Accept: image/png` and the like the picture itself",
    }
}


def create_app(
    backends: Sequence[ImageBackend],
    settings: ServeSettings,
    front: Front | None = None,
    text: TextBackend | None = None,
    add_batch_routes: AddRoutes | None = None,
    pool: ModelPool | None = None,
) -> FastAPI:
    """Create the application. `backends` are in the order of the settings' models; `pool` loads
    models at run time."""
    models, front = ServedModels(settings, backends, pool=pool), front or Front()
    app = FastAPI(
        title="Stable Diffusion XL with DeepCache",
        version=sdxl.__version__,
        redirect_slashes=False,
        responses=ERRORS,
        docs_url=None,
        redoc_url=None,
    )
    folder = folder_of(settings.results_dir)
    store = ResultStore(folder, settings.results_ttl_s, settings.results_max_bytes)
    limiter = RateLimiter(share=1 / settings.ingresses)
    expander = Expander(text, settings.expand_s) if text else None
    decoding = DecodingThread()
    reader = RequestReader(models, decoding)
    generations = Generations(reader, settings, store, limiter, expander)
    add_generation_routes(app, generations)
    add_form_routes(app, models, decoding)
    if settings.sdapi:
        # Imported here, since most services do not need it.
        from serve.front.a1111.routes import add_webui_routes

        add_webui_routes(app, models, settings, limiter, decoding)
    llm = id_of(settings.llm) if text else None
    add_model_routes(app, models, settings, llm)
    if text is not None and llm is not None:
        add_text_routes(app, TextAnswers(text, llm, settings, limiter))
    add_result_route(app, store)
    if add_batch_routes is None:
        add_off_routes(app)
    else:
        add_batch_routes(app, reader, settings)
    add_probe_routes(app, models, front, text, settings.llm_start_s)
    add_pages(app)
    add_tags(app)
    keyring = Keyring.read(Path(settings.keys)) if settings.keys else None
    # The middleware that is added last is the outermost.
    app.add_middleware(BodyLimit, settings=settings, larger=larger_bodies(settings))
    app.add_middleware(Access, keyring=keyring, hosts=Hosts.of(settings))
    tracer = tracer_to(settings.trace_to)
    if tracer is not None:
        # Imported here, since it loads OpenTelemetry.
        from serve.front.request_tracing import RequestTracing

        app.add_middleware(RequestTracing, tracer=tracer)
    app.add_middleware(ErrorEnvelope, front=front)
    app.add_exception_handler(Problem, answer_problem)
    app.add_exception_handler(RequestValidationError, answer_invalid)
    app.add_exception_handler(HTTPException, answer_status)
    return app


def add_tags(app: FastAPI) -> None:
    """Group the routes in /docs."""
    for route in app.routes:
        if isinstance(route, APIRoute):
            tags = (tag for prefix, tag in TAGS.items() if route.path.startswith(prefix))
            route.tags = [next(tags)]


def larger_bodies(settings: ServeSettings) -> dict[str, tuple[int, float]]:
    paths = GENERATIONS_PATH, EDITS_PATH, JOBS_PATH, MAPS_PATH
    with_pictures = (*paths, *(WITH_PICTURES if settings.sdapi else ()))
    return {
        **dict.fromkeys(with_pictures, (settings.max_edit_bytes, settings.edit_timeout_s)),
        FILES_PATH: (settings.max_file_body_bytes, settings.edit_timeout_s),
    }


def add_generation_routes(app: FastAPI, generations: Generations) -> None:
    @app.post(GENERATIONS_PATH, responses=GENERATED, response_model=ImagesResponse)
    async def generate_images(body: ImageRequest, request: Request) -> Response:
        """Make pictures from text. Compatible with OpenAI's Images API."""
        if generations.settings.log_prompts:
            log.info("%s asks for %r", request.state.request_id, body.prompt)
        return await generations.answer(body, request)

    @app.post(
        EDITS_PATH,
        responses=GENERATED,
        response_model=ImagesResponse,
        openapi_extra=describe_edit_body(),
    )
    async def edit_image(request: Request) -> Response:
        """Redraw an image, or only its masked part. Compatible with OpenAI's Images API."""
        return await generations.answer(await read_edit(request), request)


def add_off_routes(app: FastAPI) -> None:
    """Answer requests for files, batches and jobs with the setting that they need."""

    async def name_setting() -> None:
        message = "Files, batches and jobs are off: this service needs the setting `batches_dir`."
        raise Problem(404, message, None, "batches_off")

    for path in (FILES_PATH, BATCHES_PATH, JOBS_PATH):
        for tail in ("", "/{rest:path}"):
            methods = ["GET", "POST", "DELETE"]
            app.add_api_route(path + tail, name_setting, methods=methods, include_in_schema=False)


def add_model_routes(
    app: FastAPI, models: ServedModels, settings: ServeSettings, llm: str | None
) -> None:
    texts = [Model(id=llm)] if llm else []

    @app.get("/v1/models", response_model_exclude_none=True)
    async def list_models() -> ModelList:
        """The first is the default of requests that name no model."""
        return ModelList(data=[*(model_of(*each) for each in await models.cards()), *texts])

    @app.post("/v1/models", response_model_exclude_none=True)
    async def load_model(body: ModelAsked, request: Request) -> Model:
        """Load a model below `models_dir`, and answer when it has made a picture. Needs an
        operator's key."""
        check_operator(request)
        model = await models.load(body.model, body.id or "", body.precision or "")
        return model_of(model, await model.backend.card())

    @app.delete("/v1/models/{model_id:path}")
    async def unload_model(model_id: str, request: Request) -> ModelDeleted:
        """Finish the pictures of a model that was loaded by `POST /v1/models`, then free its
        memory. Needs an operator's key."""
        check_operator(request)
        return ModelDeleted(id=(await models.unload(model_id)).id)

    # A hub id contains a slash.
    @app.get("/v1/models/{model_id:path}", response_model_exclude_none=True)
    async def retrieve_model(model_id: str) -> Model:
        for text in texts:
            if model_id in names_of(text.id, settings):
                return text
        model = await models.choose(model_id)
        return model_of(model, await model.backend.card())


def add_result_route(app: FastAPI, store: ResultStore) -> None:
    content = {"content": {kind: {} for kind in MEDIA.values()}, "description": "the picture"}

    @app.get("/v1/results/{name}", response_class=Response, responses={200: content})
    async def fetch_result(name: str) -> Response:
        """A picture that was requested as a `url`."""
        file = await asyncio.to_thread(store.get, name)
        if file is None:
            raise Problem(404, "There is no such result, or no longer.", None, "not_found")
        headers = {
            "cache-control": f"private, max-age={int(store.ttl_s)}, immutable",
            "x-content-type-options": "nosniff",
        }
        return Response(file, media_type=f"image/{name.rpartition('.')[2]}", headers=headers)


def model_of(model: ServedModel, card: ModelCard) -> Model:
    limits = ImageLimits.of(card, model.settings)
    return Model(id=model.id, images=limits, engines=RunningEngines.of(card))


async def answer_problem(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, Problem)
    return refusal(request.scope["state"], problem)


async def answer_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    # The first part is body, query or path.
    kind, place = first["type"], [str(part) for part in first["loc"][1:]]
    param, code = place[0][:100] if place else None, "invalid_value"
    if kind == "json_invalid":
        param, message = None, f"{first['msg']}."
    elif kind == UNKNOWN_FIELD:
        message, code = errors.of_schema(".".join(place)[:100], first), "unknown_parameter"
    elif param is not None:
        message = errors.of_schema(param, first)
    elif kind in NO_OBJECT:
        message = "the body must be a JSON object, sent with content-type: application/json"
    else:
        message = f"the body {errors.schema_words(first)}"
    return refusal(request.scope["state"], errors.invalid(param, message, code))


async def answer_status(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    problem = errors.of_status(error.status_code)
    if error.status_code == 404:
        path = request.url.path
        hint = hint_for(path, request.app.routes)
        message = f"{request.method} {path[:100]} is not served here; {hint}."
        problem = Problem(404, message, None, "not_found")
    answer = refusal(request.scope["state"], problem)
    answer.headers.update(error.headers or {})
    if error.status_code == 405:
        answer.headers["allow"] = ", ".join(sorted(methods_of_path(request)))
    return answer


def hint_for(path: str, routes: Sequence[BaseRoute]) -> str:
    """Return the most likely mistake of a client that requests this path."""
    scope = {"type": "http", "method": "GET", "path": f"/v1{path}", "root_path": "", "headers": []}
    if any(route.matches(scope)[0] is not Match.NONE for route in routes):
        return "a client's base URL ends with /v1"
    for prefix, setting in OFF.items():
        if path.startswith(prefix) and not any(
            getattr(r, "path", "").startswith(prefix) for r in routes
        ):
            return f"it needs the setting `{setting}`"
    return "/docs lists what is"


def methods_of_path(request: Request) -> set[str]:
    """Return the methods of all routes of this path; the framework reports only the first's."""
    routes = (r for r in request.app.routes if r.matches(request.scope)[0] is not Match.NONE)
    return {method for route in routes for method in getattr(route, "methods", None) or ()}
