"""Settings are stated once and read from three places; unknown settings are refused."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from sdxl.arguments import Parser
from sdxl.params import InvalidParams
from serve.cli import ServeFailed, check_port, start
from serve.cluster import ClusterWatch
from serve.settings import ServeSettings, add_flags, given_settings, read
from tests.serve.services import free_port


def flags(*argv: str) -> dict[str, Any]:
    parser = Parser(prog="test")
    add_flags(parser)
    return given_settings(parser.parse_args(argv))


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('port = 1001\nqueue = 7\nmodel = "a"\ndeadline_s = 5\n')
    environment = {"SDXL_PORT": "1002", "SDXL_QUEUE": "8", "SDXL_HOME": "/x", "HOME": "/y"}
    found = read(file, environment, flags("--port", "1003"))
    assert (found.port, found.queue, found.model, found.deadline_s) == (1003, 8, "a", 5)
    assert read(None, {}) == ServeSettings()


def test_booleans_are_read_from_every_place(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text("log_prompts = true\n")
    assert read(file, {}).log_prompts
    assert not read(file, {"SDXL_LOG_PROMPTS": "off"}).log_prompts
    assert read(None, {}, flags("--log-prompts")).log_prompts
    assert not read(file, {}, flags("--no-log-prompts")).log_prompts


@pytest.mark.parametrize(
    ("stored", "environment", "argv", "named"),
    [
        ("prot = 1", {}, (), "prot"),
        ("", {"SDXL_PROT": "1"}, (), "SDXL_PROT"),
        ('port = "8000"', {}, (), "port"),
        ("port = 1.5", {}, (), "port"),
        ("port = true", {}, (), "port"),
        ("port =", {}, (), "settings"),
        ("", {"SDXL_PORT": "x"}, (), "port"),
        ("", {"SDXL_INSECURE": "maybe"}, (), "insecure"),
        ("", {}, ("--queue", "-1"), "queue"),
        ("", {}, ("--port", "65536"), "port"),
        ("", {}, ("--max-n", "11"), "max_n must be at most 10, got 11"),
        ("", {}, ("--max-prompt-chars", "10001"), "max_prompt_chars"),
        ("", {}, ("--deadline-s", "nan"), "deadline_s"),
        ("", {}, ("--deadline-s", "500"), "deadline_s"),
        ("", {}, ("--llm-backend", "gpt"), "llm_backend"),
        ("", {}, ("--device", "tpu"), "device"),
        ("", {}, ("--replicas", "3", "--max-replicas", "2"), "max_replicas"),
        ("", {}, ("--max-replicas", "2", "--target-queue-s", "0"), "target_queue_s"),
        ("", {}, ("--llm-replicas", "3", "--llm-max-replicas", "2"), "llm_max_replicas"),
    ],
)
def test_a_wrong_setting_is_named(
    tmp_path: Path, stored: str, environment: dict[str, str], argv: tuple[str, ...], named: str
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(stored)
    with pytest.raises(InvalidParams, match=named):
        read(file, environment, flags(*argv))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.1", "example.org"])
def test_a_public_address_needs_keys_or_insecure(host: str) -> None:
    with pytest.raises(InvalidParams, match="host"):
        ServeSettings(host=host)
    ServeSettings(host=host, insecure=True)
    ServeSettings(host=host, keys="keys.txt")
    for loopback in ("127.1.2.3", "::1", "localhost"):
        ServeSettings(host=loopback)


def test_a_taken_port_is_reported_before_anything_starts() -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            InvalidParams, match=f"port must be a free port of 127.0.0.1 .*got {port}"
        ):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", port)
    check_port("localhost", port)
    with pytest.raises(InvalidParams, match="port"):
        check_port("no.such.host.invalid", port)


def test_a_ray_that_does_not_start_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def late(**_: object) -> None:
        raise Exception("The current node timed out during startup.\nThis could happen.")

    monkeypatch.setattr(ray, "init", late)
    with pytest.raises(ServeFailed, match=r"^Ray did not start: The current node timed out"):
        start(ServeSettings(port=free_port()), ClusterWatch(print))
