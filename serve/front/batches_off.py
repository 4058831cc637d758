"""`/v1/files` and `/v1/batches` where a service has no place for them: what setting gives one."""

from __future__ import annotations

from fastapi import FastAPI

from serve.errors import Problem

FILES_PATH, BATCHES_PATH = "/v1/files", "/v1/batches"
METHODS = ["GET", "POST", "DELETE"]


def add_off_routes(app: FastAPI) -> None:
    async def tell_setting() -> None:
        message = "Files and batches are off: this service needs the setting `batches_dir`."
        raise Problem(404, message, None, "batches_off")

    for path in (FILES_PATH, BATCHES_PATH):
        for tail in ("", "/{rest:path}"):
            app.add_api_route(path + tail, tell_setting, methods=METHODS, include_in_schema=False)
