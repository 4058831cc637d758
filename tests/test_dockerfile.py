"""The Dockerfile, without building it: test_image_long.py does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from sdxl.cli import COMMANDS
from serve.cli import read_settings
from tests.dockerfile import ROOT, arguments, stage
from tests.isolation import run_alone
from tests.serve.servers import listening
from tests.serve.services import free_port
from tests.serve.workers import fake_pipeline
from tests.test_deployment import write_foreign_model

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def setup_command() -> str:
    (command,) = (rest for rest in arguments("RUN") if rest.startswith("make "))
    return command


def test_every_command_is_bash() -> None:
    for text in arguments("RUN"):
        done = subprocess.run(["bash", "-n", "-c", text], capture_output=True, text=True)
        assert done.returncode == 0, f"{text}\n{done.stderr}"


def test_it_installs_as_ci_does_with_extras_that_exist() -> None:
    command = ["make", "-n", *setup_command().split()[1:]]
    command = [part.replace("/opt/sdxl", "/nowhere/sdxl") for part in command]
    shell = " ".join(command).replace("${BACKENDS}", "tensorrt")
    output = subprocess.run(
        ["bash", "-c", shell], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    locked, own = (line for line in output.splitlines() if "pip install" in line)
    assert "--require-hashes -r locks/tensorrt.txt" in locked, locked
    assert "--no-deps --no-build-isolation '.[serve,export,eval,c2pa,s3,tensorrt]'" in own, own
    known = PROJECT["optional-dependencies"]
    assert {"serve", "export", "eval", "c2pa", "s3", "tensorrt", "tensorrt-rtx"} <= set(known)


def test_several_backends_are_installed_from_their_locks() -> None:
    command = ["make", "-n", "setup", "VENV=/nowhere/sdxl", "LOCKED=tensorrt,tensorrt-rtx"]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert "--require-hashes -r locks/tensorrt.txt -r locks/tensorrt-rtx.txt" in output, output


def test_copied_files_exist_and_are_not_ignored() -> None:
    allowed = {
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied = set()
    for text in arguments("COPY"):
        if not text.startswith("--from"):
            copied |= set(text.split()[:-1])
    assert copied == allowed and all((ROOT / name).exists() for name in copied)
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "training"}
    assert packages <= copied, f"{packages - copied} are packages and not in the image"


def test_the_project_supports_its_python() -> None:
    assert "Programming Language :: Python :: 3.12" in PROJECT["classifiers"]
    assert all("python3.12" in text for text in arguments("RUN") if "python3" in text)


def test_it_runs_as_a_user_and_writes_to_a_volume() -> None:
    steps = stage("service")
    last = max(place for place, (name, _) in enumerate(steps) if name == "USER")
    assert int(steps[last][1]) > 0, f"it ends as {steps[last][1]}"
    assert all(name not in ("RUN", "FROM") for name, _ in steps[last:]), "installs as a user"
    (text,) = (rest for name, rest in steps if name == "ENV")
    environment = dict(pair.split("=", 1) for pair in text.split())
    home, (volumes,) = environment["SDXL_HOME"], arguments("VOLUME")
    written = ("HF_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    assert home in volumes and all(environment[name].startswith(home) for name in written)


def test_it_serves_by_default() -> None:
    (program,), (rest,) = arguments("ENTRYPOINT"), arguments("CMD")
    name, command, *flags = json.loads(program) + json.loads(rest)
    assert (name, command) == ("sdxl", "serve")
    assert read_settings(flags).keys == "/run/secrets/sdxl_keys"
    compose = yaml.safe_load((ROOT / "serve/deploy/compose.yaml").read_text())
    command, *flags = compose["services"]["sdxl"]["command"]
    assert command == "serve" and read_settings(flags).keys == "/run/secrets/sdxl_keys"


def test_documents_run_existing_commands_in_it() -> None:
    """A command of `sdxl --help` follows the image's name."""
    texts = [ROOT / "Dockerfile", ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    used = {
        command
        for path in texts
        for command in re.findall(r"docker run .*? sdxl(?:-llm)? (\S+)", path.read_text())
    }
    assert {"serve", "export"} <= used and used <= set(COMMANDS), used


def test_without_engines_triton_can_compile() -> None:
    """Triton compiles each kernel's launcher with a C compiler and Python's headers."""
    (text,) = (rest for name, rest in stage("python") if name == "RUN")
    assert {"gcc", "libc6-dev", "python3.12-dev"} <= set(text.split())


def test_only_the_language_models_interpreter_finds_its_images_libraries(tmp_path: Path) -> None:
    """Run the stage's commands, without those of pip and apt."""
    (text,) = (rest for _, rest in stage("llm") if "/opt/trtllm/own" in rest)
    steps = [step for step in text.split(" && ") if "pip" not in step]
    own = tmp_path / "own/bin/python"
    own.parent.mkdir(parents=True)
    own.write_text('#!/bin/sh\necho "$LD_LIBRARY_PATH" "$@"\n')
    own.chmod(0o755)
    script = " && ".join(steps[1:]).replace("/opt/trtllm", str(tmp_path))
    environment = {**os.environ, "LD_LIBRARY_PATH": "/of/nvidia"}
    subprocess.run(["sh", "-euc", script], check=True, env=environment)
    output = subprocess.run(
        [tmp_path / "bin/python", "-m", "a", "b c"],
        env={**os.environ, "LD_LIBRARY_PATH": "/of/service"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert output == "/of/nvidia -m a b c\n"
    assert ("ENV", "LD_LIBRARY_PATH=/usr/local/nvidia/lib:/usr/local/nvidia/lib64") in (
        stage("llm")
    )


def test_its_health_check_passes_for_a_ready_service() -> None:
    (text,) = arguments("HEALTHCHECK")
    program, *rest = json.loads(text.partition("CMD ")[2])
    assert program == "python"

    def check(url: str) -> int:
        command = [part.replace("http://127.0.0.1:8000", url) for part in rest]
        assert command != rest
        # The machine may be busy.
        command = [part.replace("timeout=5", "timeout=60") for part in command]
        return subprocess.run([sys.executable, *command], capture_output=True).returncode

    with listening(fake_pipeline()) as (url, _):
        assert check(url) == 0
    assert check(f"http://127.0.0.1:{free_port()}") != 0


READ_ONLY = """
! touch /anywhere 2> /dev/null
test "$(id -u)" = 10001
sdxl key me --file /mnt/keys.txt > /mnt/secret
sdxl serve --host 0.0.0.0 --keys /mnt/keys.txt --llm none &
until curl -sf http://127.0.0.1:8000/readyz; do kill -0 $!; sleep 0.5; done
curl -sf http://127.0.0.1:8000/v1/images/generations -H "authorization: Bearer $(cat /mnt/secret)" \
  -H 'content-type: application/json' -d '{"prompt": "a ring", "response_format": "url"}'
kill $!
wait $! && echo "ended well"
"""


@pytest.mark.long
def test_it_serves_on_a_read_only_root_as_a_user_without_rights(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    done = run_alone(READ_ONLY, tmp_path, 400, user=10001)
    assert done.returncode == 0 and "ended well" in done.stdout, done.stdout + done.stderr[-3000:]
    assert "/v1/results/" in done.stdout


EXPORTS = """
! touch /anywhere 2> /dev/null
mkdir /tmp/models
cp -r /mnt/foreign /tmp/models/sdxl
test "$(stat -c %d /tmp/models/sdxl)" != "$(stat -c %d /mnt)"
export SDXL_HOME=/mnt/home
"""
"""The models and the files made from them are separate volumes, on two file systems."""
QUICKLY = "--calibration-count 2 --check-prompts 1 --check-steps 2"
FOR_AN_L40S = "--backend tensorrt-rtx --gpu l40s"


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_it_exports_and_builds_where_nothing_but_its_volumes_can_be_written(tmp_path: Path) -> None:
    """This runs the commands of the deployment page, with a build that needs no GPU."""
    pytest.importorskip("tensorrt_rtx")
    tmp_path.chmod(0o777)
    write_foreign_model(tmp_path / "foreign")
    export, build = in_the_image()
    script = EXPORTS + f"{export} {QUICKLY}\n{build} {FOR_AN_L40S}\n"
    done = run_alone(script, tmp_path, 2300, user=10001)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "int8 for L40S, tensorrt-rtx" in done.stdout, done.stdout
    (weights,) = (tmp_path / "home" / "onnx").glob("*/unet.safetensors")
    source = tmp_path / "foreign" / "unet" / "diffusion_pytorch_model.safetensors"
    assert weights.stat().st_nlink == 1 and weights.read_bytes() == source.read_bytes()


def in_the_image() -> list[str]:
    """Return the commands that docs/deploy.md runs in the image, for these volumes."""
    text = (ROOT / "docs" / "deploy.md").read_text()
    found = re.findall(r"^docker run .*? (sdxl (?:export|build) .*)$", text, re.M)
    return [line.replace("/models", "/tmp/models") for line in found]
