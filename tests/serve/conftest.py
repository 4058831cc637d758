"""A worker on fake engines, a simulated GPU, and a bucket of an object store."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest

from sdxl.catalogue import Catalogue
from sdxl.pipeline import Pipeline
from serve.worker import gpu_meter
from serve.worker.worker import Worker
from tests.sdxl.control_nets import random_control, random_union
from tests.serve import workers


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an `async def` test in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    """A worker on fake engines."""
    with workers.running() as found:
        yield found


@pytest.fixture(scope="module")
def controlled(mini: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A worker of the embedded model with two ControlNets, `edges` and `more/union`."""
    folder = tmp_path_factory.mktemp("controlnets")
    random_control(1).save_pretrained(folder / "edges")
    random_union(3).save_pretrained(folder / "more" / "union")
    catalogue = Catalogue(control_folders=[folder])
    with workers.running(replace(mini, catalogue=catalogue)) as found:
        yield found


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU 0, as NVIDIA's management library describes it to the service."""
    library = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(used=7 << 30),
        nvmlDeviceGetTotalEnergyConsumption=lambda _: 1500,
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(gpu_meter, "_devices", lambda: [("0", object())])


@pytest.fixture(scope="session")
def endpoint() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[str]:
    import s3fs

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    s3fs.S3FileSystem.clear_instance_cache()
    name = f"b{abs(hash(request.node.name)) % 10**9}"
    s3fs.S3FileSystem().mkdir(name)
    yield f"s3://{name}/job"
    s3fs.S3FileSystem.clear_instance_cache()
