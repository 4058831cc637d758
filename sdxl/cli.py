"""The `sdxl` command: finds the function of a command and turns errors into exit codes.

It imports only the command that runs; no module imports it.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Sequence

import sdxl

COMMANDS = {
    "render": ("serve.render.command:main", "make pictures from text"),
    "verify": ("serve.render.verification:main", "read the provenance of a picture"),
    "serve": ("serve.cli:main", "serve pictures over HTTP with OpenAI's API"),
    "batch": ("serve.batch.command:main", "make a picture for every row of a file"),
    "key": ("serve.front.keys:main", "make an API key for the service"),
    "export": ("onnx_export.command:main", "export a model to ONNX graphs, also in 8 bits"),
    "build": ("engines.build_command:main", "build TensorRT engines from an export"),
    "engines": ("engines.engines_command:main", "list the built engines"),
    "eval": ("eval.command:main", "measure the quality of a model's pictures"),
    "tune": ("eval.tune_command:main", "find a model's best plans, or a language model's options"),
    "bench": ("eval.bench_command:main", "measure speed: against peers, the floor, MLPerf's rules"),
}
PACKAGES = ("sdxl", "engines", "onnx_export", "serve", "eval")
FAILED, BAD_REQUEST, INTERRUPTED, PIPE_CLOSED = 1, 2, 130, 141
TRACEBACK = "SDXL_TRACEBACK"
UNREACHABLE = ("httpx", "ConnectError")
"""Package and class of the error for a service that cannot be reached; httpx is slow to import."""


class UnknownCommand(ValueError):
    """The first argument is not a command."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        code = run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The pipe's reader has ended. Python would flush stdout again at exit and print an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        if os.environ.get(TRACEBACK):
            raise
        print(f"sdxl: {describe(error)}", file=sys.stderr)
        return BAD_REQUEST if is_bad_request(error) else FAILED


def run(arguments: list[str]) -> int:
    match arguments:
        case ["-h" | "--help" | "--help-all", *_]:
            print(usage())
            return 0
        case ["--version", *_]:
            print(f"sdxl {sdxl.__version__}")
            return 0
        case []:
            print(usage(), file=sys.stderr)
            return BAD_REQUEST
        case [name, *rest] if name in COMMANDS:
            print_slow_work(name)
            return command(name)(rest)
        case _:
            from sdxl.suggestions import did_you_mean

            name = arguments[0]
            allowed = f"must be one of {', '.join(COMMANDS)}, or --help"
            raise UnknownCommand(f"command {allowed}, got {name!r}{did_you_mean(name, COMMANDS)}")


def print_slow_work(command: str) -> None:
    """Print the log of slow.py. Processes of the service configure their own log."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"sdxl {command}: %(message)s"))
    log = logging.getLogger("sdxl.slow")
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)


def usage() -> str:
    width = max(map(len, COMMANDS)) + 2
    rows = "\n".join(f"  {name:<{width}}{text}" for name, (_, text) in COMMANDS.items())
    return (
        f"usage: sdxl COMMAND …\n\nStable Diffusion XL with DeepCache.\n\n{rows}\n\n"
        "`sdxl COMMAND --help` lists the usual flags, --help-all every flag."
    )


def command(name: str) -> Callable[[list[str]], int]:
    module, _, function = COMMANDS[name][0].partition(":")
    return getattr(importlib.import_module(module), function)


def is_bad_request(error: Exception) -> bool:
    # Imported here: `sdxl --help` needs neither.
    from argparse import ArgumentError

    from sdxl.params import InvalidParams

    return isinstance(error, InvalidParams | ArgumentError | UnknownCommand)


def describe(error: Exception) -> str:
    """Return one line. Unexpected errors are defects: their line names SDXL_TRACEBACK."""
    message = " ".join(str(error).split())
    package = type(error).__module__.partition(".")[0]
    if (package, type(error).__name__) == UNREACHABLE:
        return f"url must be a service that answers, got {error.request.url} ({message})"  # type: ignore[attr-defined]
    if package in PACKAGES or is_bad_request(error) or isinstance(error, OSError):
        return message
    return f"unexpected {type(error).__name__}: {message} ({TRACEBACK}=1 shows where)"


if __name__ == "__main__":
    sys.exit(main())
