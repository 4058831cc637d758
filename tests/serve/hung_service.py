"""Run as a program: `sdxl serve`, with replicas that hang on demand.

python -m tests.serve.hung_service FOLDER [FLAG …]

The first replica that finds FOLDER/engine or FOLDER/loop removes the file. Then its next UNet call
never returns, or its event loop is blocked.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from sdxl.source import SourceImage
from serve import replica_deployment
from serve.orders import ImageOrder
from serve.settings import ServeSettings
from serve.worker.replica import ImageReplica

FOLDER = "HUNG_SERVICE_FOLDER"
FOR_EVER_S = 10_000


def takes(what: str) -> bool:
    try:
        Path(os.environ[FOLDER], what).unlink()
    except FileNotFoundError:
        return False
    Path(os.environ[FOLDER], f"{what}.pid").write_text(str(os.getpid()))
    return True


class HangingEngine:
    def __init__(self, engine: Any) -> None:
        self.engine, self.spec = engine, engine.spec

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        if takes("engine"):
            time.sleep(FOR_EVER_S)
        self.engine(inputs, outputs)


class HangingReplica(ImageReplica):
    def __init__(self, settings: ServeSettings) -> None:
        super().__init__(settings)
        assert self.worker._threads is not None
        loop = self.worker._threads.denoiser.loop
        by_name = dict(loop.engines.by_name)
        by_name["unet_deep"] = HangingEngine(by_name["unet_deep"])
        loop.engines = replace(loop.engines, by_name=by_name)

    async def generate(
        self, order: ImageOrder, source: SourceImage | None = None
    ) -> AsyncGenerator[Any]:
        if takes("loop"):
            time.sleep(FOR_EVER_S)
        async for update in super().generate(order, source):
            yield update


def main(folder: str, *flags: str) -> int:
    from sdxl.cli import main as sdxl

    os.environ[FOLDER] = folder
    vars(replica_deployment)["ImageReplica"] = HangingReplica
    return sdxl(["serve", *flags])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
