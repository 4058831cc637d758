"""The service at SDXL's own size (1024², 3 MB a picture) on a double of its engines, to find
failures that only large pictures cause.
"""

from __future__ import annotations

import io
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from PIL import Image
from playwright.sync_api import expect

from sdxl.images import read_parameters
from serve.batch import command
from tests.serve import double
from tests.serve.servers import GENERATE, error_of
from tests.serve.service.browsers import VIEWS, chromium, visit
from tests.serve.service.conftest import GRACE_S
from tests.serve.services import ROOT, Service, is_alive
from tests.serve.test_api import events_of, picture

PROMPT = "a lighthouse in a storm"
SIDE = 1024

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def http(full_size: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=full_size.url, timeout=300) as found:
        yield found


def check(file: bytes, format: str = "PNG") -> None:
    """Check that a picture is complete and has the size and the bytes of a real one."""
    with Image.open(io.BytesIO(file)) as image:
        assert image.format == format and image.size == (SIDE, SIDE)
        image.load()
    assert read_parameters(file)["prompt"].startswith(PROMPT)
    assert len(file) >= 1_000_000, f"{len(file)} bytes"


def test_ten_pictures_come_in_one_answer(http: httpx.Client) -> None:
    answer = http.post(GENERATE, json={"prompt": PROMPT, "n": 10, "seed": 1, "deadline_s": 120})
    assert answer.status_code == 200, answer.text[:500]
    assert len(answer.content) >= 40_000_000, "Ray passes 4 MiB between processes by default"
    files = [picture(data) for data in answer.json()["data"]]
    for file in files:
        check(file)
    assert len(set(files)) == 10


@pytest.mark.parametrize("format", ["jpeg", "webp"])
def test_every_other_format_comes_whole(http: httpx.Client, format: str) -> None:
    asked = {"prompt": PROMPT, "output_format": format, "steps": 4}
    (data,) = http.post(GENERATE, json=asked).json()["data"]
    check(picture(data), format.upper())


def test_a_stream_brings_previews_and_pictures(full_size: Service) -> None:
    with openai.OpenAI(base_url=f"{full_size.url}/v1", api_key="any", max_retries=0) as client:
        stream = client.images.generate(prompt=PROMPT, n=2, stream=True, partial_images=3)
        events = list(stream)
    kinds = [event.type.rpartition(".")[2] for event in events]
    assert sorted(kinds) == ["completed"] * 2 + ["partial_image"] * 6
    for event in events:
        with Image.open(io.BytesIO(picture(event.model_dump()))) as image:
            assert image.size == (SIDE, SIDE)


def test_progress_of_ten_streams_at_once_comes_through(http: httpx.Client) -> None:
    asked = {"prompt": PROMPT, "n": 10, "stream": True, "progress": True, "partial_images": 1}
    with http.stream("POST", GENERATE, json={**asked, "deadline_s": 120}) as answer:
        text = "".join(answer.iter_text())
    done = [e for e in events_of(text) if e["type"] == "image_generation.completed"]
    assert sorted(event["image_index"] for event in done) == list(range(10))
    for event in done:
        check(picture(event))


def test_results_are_fetched_by_their_urls(http: httpx.Client) -> None:
    asked = {"prompt": PROMPT, "n": 4, "response_format": "url"}
    for data in http.post(GENERATE, json=asked).json()["data"]:
        answer = http.get(data["url"])
        assert answer.status_code == 200
        check(answer.content)


def test_a_seed_gives_the_same_bytes_alone_and_in_company(http: httpx.Client) -> None:
    asked = {"prompt": PROMPT, "seed": 12, "steps": 6, "cache_interval": 2}
    (alone,) = http.post(GENERATE, json=asked).json()["data"]
    together = http.post(GENERATE, json={**asked, "seed": 10, "n": 4}).json()["data"]
    assert picture(together[2]) == picture(alone)


def test_the_page_makes_keeps_and_hands_out_pictures(full_size: Service) -> None:
    with chromium() as browser, visit(browser, full_size.url, VIEWS[0]) as web:
        web.generate(PROMPT, pictures=4, seed="5")
        web.wait_for_pictures(4)
        assert len(set(web.page.evaluate("previews"))) >= 4
        expect(web.page.locator("#thumbs li")).to_have_count(4)
        check(web.download())
        web.reload()
        expect(web.page.locator("#thumbs li")).to_have_count(4)
        kept = web.download()
        check(kept)
        web.drop("lighthouse.png", kept)
        expect(web.page.locator("#notices")).to_contain_text("lighthouse.png")
        assert web.holds()["prompt"] == PROMPT


def batch(source: Path, out: str, *flags: str, timeout_s: float = 550) -> None:
    argv = [sys.executable, "-m", "sdxl.cli", "batch", str(source), "--out", out, "--quiet"]
    whole = [*argv, *flags]
    done = subprocess.run(whole, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert command.main(["--verify", out]) == 0


def rows(folder: Path, count: int) -> Path:
    source = folder / "prompts.txt"
    source.write_text("".join(f"{PROMPT}, number {i}\n" for i in range(count)))
    return source


def test_a_job_through_the_service_fills_a_folder(full_size: Service, tmp_path: Path) -> None:
    batch(rows(tmp_path, 8), str(tmp_path / "out"), "--through", full_size.url)
    files = sorted((tmp_path / "out" / "images").glob("*/*.png"))
    assert len(files) == 8
    for file in files:
        check(file.read_bytes())


def test_render_makes_a_whole_file(full_size: Service, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "sdxl.cli", "render", PROMPT, "--out", str(tmp_path / "out")]
    model = ("--model", str(full_size.log.parent / "sdxl-double"), "--backend", double.BACKEND)
    done = subprocess.run([*argv, *model], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = (tmp_path / "out").rglob("*.png")
    check(file.read_bytes())


class InFlight:
    """A streamed request for long pictures; the block begins after its first step."""

    images = 4

    def __init__(self, url: str) -> None:
        self.url, self.kinds = url, list[str]()
        self._has_begun = threading.Event()
        self._thread = threading.Thread(target=self._follow)

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    @property
    def is_answered(self) -> bool:
        return self.kinds.count("completed") == self.images

    def join(self) -> None:
        self._thread.join()

    def __enter__(self) -> InFlight:
        self._thread.start()
        assert self._has_begun.wait(200), "no step was taken"
        return self

    def __exit__(self, *_: object) -> None:
        self.join()

    def _follow(self) -> None:
        body = {"prompt": PROMPT, "n": self.images, "steps": 100, "deadline_s": 400}
        asked = {**body, "stream": True, "progress": True}
        with httpx.stream("POST", f"{self.url}{GENERATE}", json=asked, timeout=400) as answer:
            for line in answer.iter_lines():
                if line.startswith("event: "):
                    self.kinds.append(line.rpartition(".")[2])
                if re.search(r'"step": [1-9]', line):
                    self._has_begun.set()


def told_meanwhile(url: str, asked: InFlight) -> list[httpx.Response]:
    """Return the answers to other requests while `asked` was in flight: lists of models until one
    is refused, then pictures. A refused connection is an error before the last answer; later
    answers of Ray do not matter."""
    answers: list[httpx.Response] = []
    while not asked.is_over:
        is_draining = bool(answers) and answers[-1].status_code == 503
        try:
            if is_draining and error_of(answers[-1])["code"] == "shutting_down":
                answer_to = httpx.post(f"{url}{GENERATE}", json={"prompt": PROMPT}, timeout=400)
            else:
                answer_to = httpx.get(f"{url}/v1/models", timeout=400)
        except httpx.HTTPError:
            asked.join()
            if not asked.is_answered:
                raise
        else:
            answers += [] if asked.is_answered else [answer_to]
        time.sleep(0.02)
    return answers


@pytest.mark.timeout(1200)
def test_sigterm_finishes_what_is_in_flight_and_leaves_no_process(full_size: Service) -> None:
    """The last test ends the service. The signal comes when a request is in flight, and new
    requests come until it ends, so the machine's speed does not matter."""
    children = full_size.processes()
    with InFlight(full_size.url) as asked:
        full_size.process.send_signal(signal.SIGTERM)
        answer_to = told_meanwhile(full_size.url, asked)
    assert full_size.process.wait(GRACE_S) == 0
    assert asked.is_answered, f"what was in flight is lost: {asked.kinds[-3:]}"
    is_refused = [answer.status_code == 503 for answer in answer_to]
    assert {answer.status_code for answer in answer_to} <= {200, 503} and any(is_refused), answer_to
    asked_late = [answer for answer in answer_to if answer.request.method == "POST"]
    assert {error_of(answer)["code"] for answer in asked_late} == {"shutting_down"}, asked_late
    left = [p.name() for p in children if is_alive(p)]
    assert len(children) > 3 and not left, f"left: {left}"
