"""`/sdapi/v1/…`: stable-diffusion-webui's API, with the same backends, admission, keys and limits
as `/v1`. The setting `sdapi` turns it on.
"""

from __future__ import annotations

import asyncio
import base64
import os
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fastapi import FastAPI, Request

from sdxl.infotext import read_text
from sdxl.parameter import MAX_ATTACHMENTS
from sdxl.params import DRAWN_SEEDS, LATENT, InvalidParams
from sdxl.picture_files import BrokenPicture, read_texts
from sdxl.source import SourceImage
from serve.errors import Problem, invalid, of_params
from serve.front.a1111 import CONTROLNET, PREFIX, controlnet, editing, wire
from serve.front.a1111.clients import ClientState, WebuiRun, states
from serve.front.access import check_operator, client_of
from serve.front.answering import deadline_of, fan_out, take_rate
from serve.front.edits import check_can_edit, prepare_edit
from serve.front.generations import marks_of, work_of
from serve.front.image_orders import orders_of, params_of
from serve.front.keys import RateLimiter
from serve.front.openai_images import ImageRequest
from serve.front.sent_pictures import DecodingThread, check, preview_of
from serve.front.served_models import ServedModel, ServedModels
from serve.orders import ImageBackend, ImageOrder, ModelCard
from serve.run_time_models import SUFFIX, files_below, find_file
from serve.settings import ServeSettings

EMPTY_LISTS = (
    *("sd-vae", "hypernetworks", "face-restorers"),
    *("realesrgan-models", "prompt-styles", "script-info"),
)
"""Lists that clients request at their start; they are empty here."""


@dataclass
class WebuiApi:
    models: ServedModels
    settings: ServeSettings
    limiter: RateLimiter
    decoding: DecodingThread
    client_state: Callable[[str], ClientState] = field(default_factory=states)

    def state_of(self, request: Request) -> ClientState:
        return self.client_state(client_of(request, self.settings.client_header)[0])

    async def card_of(self, request: Request) -> ModelCard:
        """Return the card of the client's model."""
        model = await self.model_of(self.state_of(request).options)
        return await model.backend.card()

    async def model_of(self, options: dict[str, Any]) -> ServedModel:
        """Return the client's model, or the first one while it is not loaded."""
        await self.models.refresh()
        try:
            return wire.model_in(options, self.models.all)
        except Problem:
            return self.models.all[0]

    async def checked(self, options: dict[str, Any], request: Request) -> dict[str, Any]:
        """Load the options' checkpoint and return the supported options."""
        return wire.checked_options(await self.with_loaded(options, request), self.models.all)

    async def with_loaded(self, options: dict[str, Any], request: Request) -> dict[str, Any]:
        """Load a checkpoint below `models_dir`; return the options with the loaded model's name."""
        name, models = wire.name_in(options), self.models
        if name is None or models.pool is None:
            return options
        with suppress(Problem):
            await models.choose(name)
            return options
        try:
            file = await asyncio.to_thread(find_file, self.settings.models_dir, name)
        except Problem:
            # wire.checked_options refuses the name, and lists the loaded models.
            return options
        model = models.of_file(file)
        if model is None:
            check_operator(request)
            model = await models.load(file.name)
        return {**options, wire.CHECKPOINT: wire.title_of(model.id)}

    async def _resolve(
        self, asked: wire.TextToImage, request: Request
    ) -> tuple[dict[str, Any], ServedModel, ModelCard]:
        """Return the client's options, overridden by the request's, its model and the card."""
        overrides = await self.checked(asked.override_settings or {}, request)
        options = {**self.state_of(request).options, **overrides}
        options = await self.with_loaded(options, request)
        model = wire.model_in(options, self.models.all)
        return options, model, await model.backend.card()

    async def make(self, asked: wire.TextToImage, request: Request) -> dict[str, Any]:
        options, model, card = await self._resolve(asked, request)
        usual_steps = params_of(ImageRequest(prompt=""), card, model.settings).steps
        wanted = wire.request_of(asked, options, usual_steps)
        lists, maps = controlnet.lists_of(asked, card)
        until_s = self._until_s(asked, request)
        if lists:
            wanted = wanted.model_copy(update=lists)
            read = partial(check, wanted, maps, card, model.settings)
            await self.decoding.run(read, until_s)
        return await self._answer(asked, request, wanted, model, card, until_s, maps=maps)

    async def edit(self, asked: editing.ImageToImage, request: Request) -> dict[str, Any]:
        options, model, card = await self._resolve(asked, request)
        check_can_edit(card)
        lists, maps = controlnet.lists_of(asked, card)

        def source() -> tuple[ImageRequest, SourceImage]:
            try:
                wanted, given = editing.edit_of(asked, options)
                wanted = wanted.model_copy(update=lists)
                return prepare_edit(wanted, given, card, model.settings, maps)
            except InvalidParams as error:
                raise of_params(error) from None

        until_s = self._until_s(asked, request)
        wanted, image = await self.decoding.run(source, until_s)
        # The answer does not repeat the images.
        echo = asked.model_copy(update={"init_images": [], "mask": None})
        files = {"source": image, "maps": maps}
        return await self._answer(echo, request, wanted, model, card, until_s, **files)

    def _until_s(self, asked: wire.TextToImage, request: Request) -> float:
        """Return when a request within the key's rate must be done, or raise Problem."""
        take_rate(self.limiter, request, asked.count, is_charged=False)
        return time.monotonic() + deadline_of(None, request, self.settings)

    async def _answer(
        self,
        asked: wire.TextToImage,
        request: Request,
        wanted: ImageRequest,
        model: ServedModel,
        card: ModelCard,
        until_s: float,
        **pictures: Any,
    ) -> dict[str, Any]:
        """Make the pictures. The answer repeats `asked`; `wanted` is the same request for /v1."""
        seed, marks = secrets.randbelow(DRAWN_SEEDS), marks_of(request, model)
        orders = [
            replace(each, wants_progress=True, **marks, **pictures)
            for each in orders_of(wanted, card, model.settings, seed, until_s - time.monotonic())
        ]
        take_rate(self.limiter, request, len(orders), work_of(orders, card))
        run, runs = WebuiRun(len(orders), orders[0].params.all_steps), self.state_of(request).runs
        runs.append(run)
        try:
            run.task = asyncio.ensure_future(self._follow(orders, run, model.backend))
            await run.task
        except asyncio.CancelledError:
            # An interrupted request is answered with its finished pictures.
            if not run.is_interrupted:
                raise
        finally:
            runs.remove(run)
        done = run.pictures
        texts = [texts_of(each.image)[0] for each in done]
        return wire.answer_of(controlnet.without_pictures(asked), done, texts, model)

    async def _follow(
        self, orders: Sequence[ImageOrder], run: WebuiRun, backend: ImageBackend
    ) -> None:
        async with aclosing(fan_out(backend, orders, orders[0].deadline_s)) as updates:
            async for index, update in updates:
                run.note(index, update)


def add_webui_routes(
    app: FastAPI,
    models: ServedModels,
    settings: ServeSettings,
    limiter: RateLimiter,
    decoding: DecodingThread,
) -> None:
    api = WebuiApi(models, settings, limiter, decoding)

    @app.post(f"{PREFIX}/txt2img")
    async def make_webui_images(body: wire.TextToImage, request: Request) -> dict[str, Any]:
        """Make pictures from text, for clients of stable-diffusion-webui."""
        return await api.make(body, request)

    @app.post(f"{PREFIX}/img2img")
    async def edit_webui_image(body: editing.ImageToImage, request: Request) -> dict[str, Any]:
        """Redraw an image, or only its masked part."""
        return await api.edit(body, request)

    @app.post(f"{PREFIX}/png-info")
    async def read_webui_picture(body: wire.PictureInfo) -> dict[str, Any]:
        """Read a picture's parameters from its metadata."""
        return await asyncio.to_thread(picture_info, wire.image_bytes(body.image))

    @app.get(f"{PREFIX}/progress")
    async def tell_webui_progress(request: Request) -> dict[str, Any]:
        return api.state_of(request).progress()

    async def interrupt(request: Request) -> dict[str, Any]:
        """End this client's requests; each answers with its finished pictures."""
        api.state_of(request).interrupt()
        return {}

    for name in ("interrupt", "skip"):
        app.post(f"{PREFIX}/{name}", name=f"webui_{name}")(interrupt)
    for path, answer in fixed_answers().items():
        app.get(path, name=path.replace("/", "_"))(partial(give, answer))
    add_option_routes(app, api)
    add_list_routes(app, api)
    add_controlnet_routes(app, api)


async def give(answer: Any) -> Any:
    return answer


def fixed_answers() -> dict[str, Any]:
    """Return by path the answers that are the same for every client and model."""
    modules = controlnet.module_detail()
    lists: dict[str, Any] = {
        **{name: [] for name in EMPTY_LISTS},
        "samplers": wire.samplers(),
        "schedulers": wire.schedulers(),
        "upscalers": wire.upscalers(),
        "latent-upscale-modes": [{"name": LATENT.capitalize()}],
        "scripts": {"txt2img": [], "img2img": []},
        "cmd-flags": {},
    }
    of_controlnet = {
        "version": {"version": controlnet.VERSION},
        "settings": {"control_net_unit_count": MAX_ATTACHMENTS},
        "module_list": {"module_list": list(modules), "module_detail": modules},
    }
    return {
        **{f"{PREFIX}/{name}": answer for name, answer in lists.items()},
        **{f"{CONTROLNET}/{name}": answer for name, answer in of_controlnet.items()},
    }


def add_option_routes(app: FastAPI, api: WebuiApi) -> None:
    @app.get(f"{PREFIX}/options")
    async def show_webui_options(request: Request) -> dict[str, Any]:
        options = api.state_of(request).options
        model = await api.model_of(options)
        checkpoint = {wire.CHECKPOINT: wire.title_of(model.id), "sd_checkpoint_hash": None}
        return {**wire.OPTIONS, **options, **checkpoint}

    @app.post(f"{PREFIX}/options")
    async def set_webui_options(body: dict[str, Any], request: Request) -> None:
        """Set options of this client's requests. A checkpoint below `models_dir` is loaded."""
        api.state_of(request).options |= await api.checked(body, request)

    @app.post(f"{PREFIX}/unload-checkpoint")
    async def unload_webui_checkpoint(request: Request) -> dict[str, Any]:
        """Unload this client's checkpoint; its next request loads it again."""
        check_operator(request)
        await api.models.unload((await api.model_of(api.state_of(request).options)).id)
        return {}

    @app.post(f"{PREFIX}/reload-checkpoint")
    async def reload_webui_checkpoint(request: Request) -> dict[str, Any]:
        """Load this client's checkpoint, if it was unloaded."""
        await api.with_loaded(api.state_of(request).options, request)
        return {}

    async def refresh() -> None:
        """Do nothing: new files are found without it."""

    for name in ("checkpoints", "loras", "vae"):
        app.post(f"{PREFIX}/refresh-{name}", name=f"webui_refresh_{name}")(refresh)


def add_list_routes(app: FastAPI, api: WebuiApi) -> None:
    @app.get(f"{PREFIX}/sd-models")
    async def list_webui_models() -> list[dict[str, Any]]:
        """The loaded models, then those below `models_dir` that can be loaded."""
        await api.models.refresh()
        models = api.models.all
        folder, files = api.settings.models_dir, []
        if api.models.pool is not None:
            files = await asyncio.to_thread(files_below, folder)
        loaded = {each.settings.model for each in models}
        more = [f.name.removesuffix(SUFFIX) for f in files if f.path(folder) not in loaded]
        return [wire.describe_model(name) for name in (*(model.id for model in models), *more)]

    @app.get(f"{PREFIX}/loras")
    async def list_webui_loras(request: Request) -> list[dict[str, Any]]:
        return wire.loras(await api.card_of(request))

    @app.get(f"{PREFIX}/embeddings")
    async def list_webui_embeddings(request: Request) -> dict[str, dict[str, Any]]:
        return wire.embeddings(await api.card_of(request))

    @app.get(f"{PREFIX}/memory")
    async def tell_webui_memory() -> dict[str, Any]:
        """Memory of this front end's machine; /metrics has the memory of the GPUs."""
        page = os.sysconf("SC_PAGE_SIZE")
        total = page * os.sysconf("SC_PHYS_PAGES")
        free = page * os.sysconf("SC_AVPHYS_PAGES")
        return {
            "ram": {"free": free, "used": total - free, "total": total},
            "cuda": {"error": "unavailable"},
        }


def add_controlnet_routes(app: FastAPI, api: WebuiApi) -> None:
    @app.get(f"{CONTROLNET}/model_list")
    async def list_controlnets(request: Request) -> dict[str, list[str]]:
        return {"model_list": controlnet.models_of(await api.card_of(request))}

    @app.get(f"{CONTROLNET}/control_types")
    async def list_control_types(request: Request) -> dict[str, Any]:
        return {"control_types": controlnet.control_types(await api.card_of(request))}

    @app.post(f"{CONTROLNET}/detect")
    async def detect(body: controlnet.Detection) -> dict[str, Any]:
        """Preprocess pictures: canny draws their edges."""
        files = [wire.image_bytes(each) for each in body.images]
        each = [partial(preview_of, file, **body.fields) for file in files]
        made = [base64.b64encode(await api.decoding.run(draw)).decode() for draw in each]
        return {"images": made, "info": "Success"}


def picture_info(file: bytes) -> dict[str, Any]:
    text, items = texts_of(file)
    return {"info": text, "items": items, "parameters": read_text(text).params if text else {}}


def texts_of(file: bytes) -> tuple[str, dict[str, str]]:
    """Return the `parameters` text, and the other texts of a picture's metadata."""
    try:
        words = read_texts(file)
    except BrokenPicture as error:
        raise invalid("image", f"image: {error}") from None
    return words.pop("parameters", ""), words
