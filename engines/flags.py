"""The flags for a model and its backend, of commands that load one."""

from __future__ import annotations

import argparse

from engines import BACKENDS, CONTROLNETS, FOLDER, IP_ADAPTERS, LORAS, PRECISION
from sdxl.arguments import MODEL, UNCHECKED, VAE


def add_engine_flags(flags: argparse._ActionsContainer, remark: str) -> None:
    """Add the flags to a parser or a group; `remark` ends the help of --model."""
    add = flags.add_argument
    add("--model", help=f"{MODEL} {remark}")
    add("--vae", metavar="FILE", help=VAE)
    add("--backend", default="auto", help=f"{', '.join(BACKENDS)} (default %(default)s)")
    add("--precision", help=PRECISION)
    add_folder_flags(flags)
    add("--loras", default="", dest="lora_folder", metavar="DIR", help=LORAS)
    add("--controlnets", default="", dest="control_folder", metavar="DIR", help=CONTROLNETS)
    add("--ip-adapters", default="", dest="image_folder", metavar="DIR", help=IP_ADAPTERS)


def add_folder_flags(flags: argparse._ActionsContainer) -> None:
    add = flags.add_argument
    add("--engines", default="", metavar="DIR", help=FOLDER)
    add("--unchecked", action="store_true", dest="takes_unchecked", help=UNCHECKED)
