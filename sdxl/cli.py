"""The command line's entry: a table from command to function, and the one place where errors become
exit codes. It imports no command that was not asked for; nothing imports it.
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
    "verify": ("serve.render.verification:main", "tell what a picture says of its origin"),
    "serve": ("serve.cli:main", "serve pictures over HTTP, as OpenAI's clients ask for them"),
    "batch": ("serve.batch.command:main", "make a picture of every row of a file, over days"),
    "key": ("serve.front.keys:main", "make an API key for the service"),
    "export": ("onnx_export.command:main", "turn a model into ONNX graphs, 8-bit ones too"),
    "build": ("engines.build_command:main", "build TensorRT engines from an export"),
    "engines": ("engines.engines_command:main", "list the engines that are here"),
    "eval": ("eval.command:main", "measure the quality of a model's pictures"),
    "tune": ("eval.tune_command:main", "find a model's best plans, or a language model's options"),
    "bench": ("eval.bench_command:main", "measure speed: against peers, the floor, MLPerf's rules"),
}
PACKAGES = ("sdxl", "engines", "onnx_export", "serve", "eval")
FAILED, BAD_REQUEST, INTERRUPTED, PIPE_CLOSED = 1, 2, 130, 141
TRACEBACK = "SDXL_TRACEBACK"
UNREACHABLE = ("httpx", "ConnectError")
"""The error of a client whose service is not there; its module is not imported here."""


class UnknownCommand(ValueError):
    """No such command."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        code = run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader has gone. Python would flush stdout once more at exit, and complain.
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
            name_what_is_slow(name)
            return command(name)(rest)
        case _:
            from sdxl.suggestions import did_you_mean

            asked = arguments[0]
            allowed = f"must be one of {', '.join(COMMANDS)}, or --help"
            hint = did_you_mean(asked, COMMANDS)
            raise UnknownCommand(f"command {allowed}, got {asked!r}{hint}")


def name_what_is_slow(command: str) -> None:
    """See slow.py; processes of the service have a log of their own."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"sdxl {command}: %(message)s"))
    log = logging.getLogger("sdxl.slow")
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)


def usage() -> str:
    width = max(map(len, COMMANDS)) + 2
    rows = (f"  {name:<{width}}{text}" for name, (_, text) in COMMANDS.items())
    return "\n".join(
        (
            "usage: sdxl COMMAND …",
            "",
            "Stable Diffusion XL with DeepCache.",
            "",
            *rows,
            "",
            "`sdxl COMMAND --help` lists the usual flags, --help-all every flag.",
        )
    )


def command(name: str) -> Callable[[list[str]], int]:
    module, _, function = COMMANDS[name][0].partition(":")
    found: Callable[[list[str]], int] = getattr(importlib.import_module(module), function)
    return found


def is_bad_request(error: Exception) -> bool:
    # Imported now that something went wrong: `sdxl --help` needs neither.
    from argparse import ArgumentError

    from sdxl.params import InvalidParams

    return isinstance(error, InvalidParams | ArgumentError | UnknownCommand)


def describe(error: Exception) -> str:
    """One line. Errors of our own and of the file system speak for themselves; any other is a
    defect, and says how to see where."""
    message = " ".join(str(error).split())
    package = type(error).__module__.partition(".")[0]
    if (package, type(error).__name__) == UNREACHABLE:
        return f"url must be a service that answers, got {error.request.url} ({message})"  # type: ignore[attr-defined]
    known = package in PACKAGES
    if known or is_bad_request(error) or isinstance(error, OSError):
        return message
    return f"unexpected {type(error).__name__}: {message} ({TRACEBACK}=1 shows where)"


if __name__ == "__main__":
    sys.exit(main())
