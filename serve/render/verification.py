"""`sdxl verify`: reads and checks a picture's provenance, whichever program made the picture."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from PIL.Image import Image

from sdxl.arguments import Parser
from sdxl.content_credentials import SOURCE_TYPE, read_claim, root_certificates
from sdxl.picture_files import BrokenPicture, opened
from serve.render.input_pictures import read_file

HOLDS, CHANGED, UNSIGNED, UNMARKED = "holds", "changed", "unsigned", "unmarked"
WATERMARKED = "watermarked"
WORDS = {
    HOLDS: "holds: the picture is as it was signed",
    CHANGED: "does not hold: the file is not as it was signed",
    UNSIGNED: "unsigned: says that a model made it, but nothing proves that it is unchanged",
    WATERMARKED: "watermarked: its pixels alone say that a model made it",
    UNMARKED: "unmarked: says nothing of its origin",
}


@dataclass(frozen=True)
class Verdict:
    file: str
    verdict: str
    format: str = ""
    source_type: str = ""
    signer: str = ""
    is_trusted: bool = False
    generator: str = ""
    is_watermarked: bool = False
    watermark_score: float = 0.0
    """a watermark needs watermark.FOUND"""
    watermark_chance: float = 1.0
    """probability of this score without a watermark"""
    failures: tuple[str, ...] = ()
    parameters: dict[str, Any] = field(default_factory=dict)


def main(argv: Sequence[str]) -> int:
    options = build_parser().parse_args(argv)
    trusted = b""
    if options.trust is not None:
        roots = read_file(str(Path(options.trust).expanduser()), "trust")
        trusted = root_certificates(roots, options.trust)
    verdicts = [verify(Path(file), trusted) for file in options.files]
    for verdict in verdicts:
        print(json.dumps(asdict(verdict)) if options.is_json else describe(verdict))
    return 0 if all(is_accepted(verdict, is_strict=bool(trusted)) for verdict in verdicts) else 1


def is_accepted(verdict: Verdict, *, is_strict: bool) -> bool:
    """Strict: accept only trusted signatures, as an unsigned picture may have been changed."""
    if is_strict:
        return verdict.verdict == HOLDS and verdict.is_trusted
    return verdict.verdict in (HOLDS, UNSIGNED, WATERMARKED)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="sdxl verify",
        description="Print the provenance of pictures, and check that they are as they were "
        "signed. Exit code 1 if one was changed or has no provenance.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE")
    trust = "root certificates that you trust; other signatures fail"
    parser.add_argument("--trust", metavar="PEM", help=trust)
    parser.add_argument(
        "--json", action="store_true", dest="is_json", help="print a JSON object for each file"
    )
    return parser


def verify(path: Path, trusted: bytes = b"") -> Verdict:
    data, name = read_file(str(path.expanduser()), "file"), str(path)
    try:
        with opened(data) as image:
            image.load()
            format, marks, facts = str(image.format).lower(), _marks(image), _watermark(image)
    except BrokenPicture as error:
        return Verdict(name, CHANGED, failures=(str(error),))
    claim = read_claim(data, format, trusted)
    facts |= {"format": format, "parameters": _parameters(data)}
    if claim is None:
        is_marked = SOURCE_TYPE in marks
        source = SOURCE_TYPE if is_marked or facts["is_watermarked"] else ""
        in_pixels = WATERMARKED if source else UNMARKED
        return Verdict(name, UNSIGNED if is_marked else in_pixels, source_type=source, **facts)
    return Verdict(
        name,
        HOLDS if claim.is_intact else CHANGED,
        source_type=claim.source_type,
        signer=claim.signer,
        is_trusted=claim.is_trusted,
        generator=claim.generator,
        failures=claim.failures,
        **facts,
    )


def describe(verdict: Verdict) -> str:
    lines = [f"{verdict.file}: {WORDS[verdict.verdict]}"]
    if verdict.source_type:
        made = "a trained model" if verdict.source_type == SOURCE_TYPE else verdict.source_type
        lines.append(f"  made by      {made}")
    if verdict.generator:
        lines.append(f"  with         {verdict.generator}")
    if verdict.signer:
        trust = "trusted" if verdict.is_trusted else "not among the trusted; --trust names more"
        lines.append(f"  signed by    {verdict.signer} ({trust})")
    if verdict.format:
        lines.append(f"  watermark    {_describe_watermark(verdict)}")
    for name in ("prompt", "seed", "model"):
        if name in verdict.parameters:
            lines.append(f"  {name:<12} {verdict.parameters[name]}")
    lines += [f"  wrong        {failure}" for failure in verdict.failures]
    return "\n".join(lines)


def _watermark(image: Image) -> dict[str, Any]:
    import numpy as np

    from sdxl.watermark import find

    finding = find(np.asarray(image.convert("RGB")))
    return {
        "is_watermarked": finding.is_found,
        "watermark_score": round(finding.score, 2),
        "watermark_chance": finding.chance,
    }


def _describe_watermark(verdict: Verdict) -> str:
    from sdxl.watermark import FOUND

    if not verdict.is_watermarked:
        return f"not found (score {verdict.watermark_score:.1f}; needs {FOUND})"
    return (
        f"found: score {verdict.watermark_score:.1f}; without one, a picture has that "
        f"with probability {verdict.watermark_chance:.0e}"
    )


def _marks(image: Image) -> str:
    packet = image.info.get("xmp") or image.info.get("XML:com.adobe.xmp") or ""
    return packet.decode(errors="replace") if isinstance(packet, bytes) else str(packet)


def _parameters(data: bytes) -> dict[str, Any]:
    from sdxl.images import NoParameters, read_parameters

    try:
        return read_parameters(data)
    except NoParameters:
        return {}
