"""Command lines: a parser with one-line errors, and a flag for each parameter of sdxl/params.py."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

from sdxl.parameter import NEEDED, Attachment
from sdxl.params import COUNT_ALIASES, PARAMETERS, InvalidParams
from sdxl.presets import QUALITIES
from sdxl.provenance import CERTIFICATE, HELP, METADATA, PRIVATE_KEY, Provenance
from sdxl.suggestions import did_you_mean

T = TypeVar("T")
MODEL = "a folder in diffusers layout, a .safetensors file, or a hub id, org/name[@revision]"
VAE = "a .safetensors file with the VAE to use instead of the model's"
UNCHECKED = "also use engines that were never compared with the model"
QUALITY = f"steps and cache interval from the model's presets: {', '.join(QUALITIES)}"
VAE_MARK = ",vae="
"""separates a model's name from its VAE"""
POSITIONAL = ("prompt",)
"""parameters without a flag"""
HELP_FLAGS = ("--help", "--help-all")
METAVARS = {str: "TEXT", int: "N", float: "X"}


class Parser(argparse.ArgumentParser):
    """A parser that raises ArgumentError instead of printing the usage; sdxl/cli.py reports errors.
    With `common`, --help shows only these flags, and --help-all every flag."""

    def __init__(self, *, common: Collection[str] = (), **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)
        self.common = common
        self.add_argument(
            HELP_FLAGS[1],
            action=_HelpAll,
            nargs=0,
            help="show every flag" if common else argparse.SUPPRESS,
            default=argparse.SUPPRESS,
        )

    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentError(None, message)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        args = list(args)
        end = args.index("--") if "--" in args else len(args)
        args = [*map(_with_dashes, args[:end]), *args[end:]]
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(self._describe_unknown(unknown))
        return options

    def _describe_unknown(self, arguments: Sequence[str]) -> str:
        flag = next((each.partition("=")[0] for each in arguments if each.startswith("-")), "")
        if not flag:
            return f"argument {arguments[0]!r} must be left out; {self.prog} --help lists all"
        hint = did_you_mean(flag, self._option_string_actions)
        return f"{flag} is not a flag of {self.prog}{hint or '; --help-all lists them'}"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            needed = f"must be one of {', '.join(action.choices)}, got {value!r}"
            raise argparse.ArgumentError(action, needed + did_you_mean(value, action.choices))

    def format_help(self) -> str:
        hidden = [each for each in self._actions if self.common and not self._is_common(each)]
        helps = [each.help for each in hidden]
        for each in hidden:
            each.help = argparse.SUPPRESS
        text = super().format_help()
        for each, help in zip(hidden, helps, strict=True):
            each.help = help
        return text

    def format_help_all(self) -> str:
        return super().format_help()

    def flag_of(self, dest: str) -> str:
        """Return the name of the flag with this `dest`, such as mixed_gpus."""
        flag = next(each.option_strings[-1] for each in self._actions if each.dest == dest)
        return flag.removeprefix("--").replace("-", "_")

    def _is_common(self, action: argparse.Action) -> bool:
        names = action.option_strings
        return not names or any(each in (*HELP_FLAGS, *self.common) for each in names)

    def _get_formatter(self) -> argparse.HelpFormatter:
        return _Formatter(prog=self.prog)


def _with_dashes(argument: str) -> str:
    """Replace underscores in a flag: --cache_interval=2 becomes --cache-interval=2."""
    flag, *value = argument.split("=", 1)
    return "=".join((flag.replace("_", "-"), *value)) if flag.startswith("--") else argument


class _Formatter(argparse.HelpFormatter):
    """Prints a usage line without flags; they are listed below."""

    def add_usage(
        self, usage: Any, actions: Iterable[argparse.Action], groups: Any, prefix: Any = None
    ) -> None:
        positional = [each for each in actions if not each.option_strings]
        super().add_usage(usage, positional, [], prefix)

    def _format_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any) -> str:
        text = super()._format_usage(usage, actions, groups, prefix).rstrip()
        return f"{text} [flags]\n\n"


class _HelpAll(argparse.Action):
    def __call__(self, parser: Any, *_: Any) -> None:
        print(parser.format_help_all(), end="")
        parser.exit()


def whole(text: str) -> int:
    return _parsed(int, text, NEEDED[int])


def number(text: str) -> float:
    return _parsed(float, text, NEEDED[float])


def check_positive(options: argparse.Namespace, *names: str) -> None:
    for name in names:
        if not getattr(options, name) > 0:
            raise InvalidParams(name, getattr(options, name), "must be more than 0")


def refuse(parser: Parser, options: argparse.Namespace, names: Iterable[str], needed: str) -> None:
    """Raise for flags that would have no effect, named by their `dest`."""
    for name in names:
        value = getattr(options, name, argparse.SUPPRESS)
        if value != parser.get_default(name):
            raise InvalidParams(parser.flag_of(name), value, needed)


def add_generation_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each parameter. Flags that are not given stay unset (argparse.SUPPRESS), so
    that `--from` can fill them with the picture's stored values."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for each in PARAMETERS.values():
        if each.name in POSITIONAL:
            continue
        if each.group not in groups:
            title = f"parameters of a picture{': ' if each.group else ''}{each.group}"
            groups[each.group] = parser.add_argument_group(title)
        is_repeated = each.kind is Attachment
        default = "" if each.default is None else f" (default {each.default})"
        metavar = each.metavar or ("NAME" if each.choices else METAVARS.get(each.kind))
        facts: dict[str, Any] = {
            "dest": each.name,
            "action": "extend" if is_repeated else "store",
            "metavar": each.needed if is_repeated else metavar,
            "type": partial(_parsed, each.parse, needed=each.needed),
            "default": argparse.SUPPRESS,
        }
        add = groups[each.group].add_argument
        main = flag_of(each.flag or each.name)
        add(main, help=each.help + each.flag_help + default, **facts)
        names = each.aliases if each.flag else each.names
        if others := set(map(flag_of, names)) - {main}:
            add(*sorted(others), help=argparse.SUPPRESS, **facts)


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_option(
    place: argparse._ActionsContainer,
    flag: str,
    default: Any,
    help: str,
    metavar: str | None = None,
    **more: Any,
) -> None:
    """Add a flag to a parser or group. The default decides the type: a list takes one or more
    values, False makes a switch. The help ends with the default."""
    if default is False:
        place.add_argument(flag, action="store_true", help=help, **more)
        return
    first, shown = default, str(default)
    if isinstance(default, list | tuple):
        first, shown = (default[0] if default else ""), ", ".join(map(str, default))
        more.setdefault("nargs", "+")
    kind = type(first)
    if default is not None:
        more.setdefault("type", {int: whole, float: number}.get(kind, kind))
    if "choices" not in more:
        more["metavar"] = metavar or (METAVARS[kind] if kind in (int, float) else None)
    text = f"{help} (default {shown})" if default and help != argparse.SUPPRESS else help
    place.add_argument(flag, default=default, help=text, **more)


def add_lora_flag(parser: argparse.ArgumentParser, text: str) -> None:
    """Add the flag for LoRAs that are fused into an export's weights."""
    facts: dict[str, Any] = {"action": "append", "default": [], "metavar": "LORA[:SCALE]"}
    parser.add_argument("--lora", help=f"{text}; may be given again", **facts)


def add_count_flag(flags: argparse._ActionsContainer, unit: str) -> None:
    facts: dict[str, Any] = {"type": whole, "default": 1, "metavar": "N", "dest": "n"}
    flags.add_argument("-n", "--n", help=f"{unit} (default %(default)s)", **facts)
    flags.add_argument(*map(flag_of, COUNT_ALIASES), help=argparse.SUPPRESS, **facts)


def add_picture_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a command that writes pictures: parameters, quality and provenance."""
    add_generation_flags(parser)
    add = parser.add_argument_group("parameters of a picture: quality").add_argument
    add("--quality", metavar="NAME", choices=QUALITIES, help=QUALITY)
    add = parser.add_argument_group("provenance").add_argument
    add("--provenance", default=METADATA, metavar="KIND", help=f"{HELP} (default %(default)s)")
    add("--certificate", default="", metavar="FILE", help=CERTIFICATE)
    add("--private-key", default="", metavar="FILE", help=PRIVATE_KEY)


def given_provenance(options: argparse.Namespace) -> Provenance:
    return Provenance(options.provenance, options.certificate, options.private_key)


def model_with(model: str, vae: str | None) -> str:
    """Join the names of a model and its VAE."""
    return f"{model}{VAE_MARK}{vae}" if vae else model


def given_params(options: argparse.Namespace) -> dict[str, Any]:
    """Return the parameters that the command line sets."""
    return {name: getattr(options, name) for name in PARAMETERS if hasattr(options, name)}


def _parsed(parse: Callable[[str], T], text: str, needed: str) -> T:
    try:
        return parse(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be {needed}, got {text!r}") from None
