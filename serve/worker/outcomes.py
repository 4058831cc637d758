"""Translates a worker's exceptions into errors for the client."""

from __future__ import annotations

import logging

from sdxl.admission import Refused
from sdxl.images import BrokenImage
from sdxl.inflight import DeadlineExceeded
from sdxl.params import InvalidParams
from serve import errors
from serve.errors import Problem
from serve.worker.safety import Unsafe
from serve.worker.stalls import Unhealthy

log = logging.getLogger(__name__)


def as_problem(error: Exception) -> Problem:
    match error:
        case Problem():
            return error
        case InvalidParams():
            return errors.of_params(error)
        case Refused():
            return Problem(
                429, f"Refused: {error}.", "deadline_s", "overloaded", error.retry_after_s
            )
        case Unsafe():
            message = "The picture was withheld: the safety checker flagged it."
            return Problem(400, message, None, "moderation_blocked")
        case DeadlineExceeded():
            return errors.late()
        case Unhealthy():
            log.error("an order failed: %s", error)
            return Problem(503, "The engines stopped working.", None, "unhealthy", 5.0)
        case BrokenImage():
            log.error("a broken image: %s", error)
            return Problem(500, "The decoder gave no picture.", None, "broken_image")
        case _:
            log.error("an engine failed", exc_info=error)
            return Problem(500, "The engine failed; the server's log says why.", None, "engine")
