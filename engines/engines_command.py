"""`sdxl engines`: lists built engines, their GPUs, and their distance from the exact model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engines.run_built import pictures_of
from sdxl.arguments import Parser

if TYPE_CHECKING:
    from engines.folders.engine_folder import EngineFolder

COLUMNS = ("model", "precision", "gpu", "backend", "images", "MiB", "parity", "folder")


def main(argv: Sequence[str]) -> int:
    options = build_parser().parse_args(argv)
    # Imported late: --help does not need these.
    from engines.folders.engine_folder import EngineError
    from engines.folders.places import plans_root
    from engines.trt.engine_store import engine_folders

    root = Path(options.root) if options.root else plans_root()
    folders = list(engine_folders(root))
    whole = [folder for folder in folders if not isinstance(folder, EngineError)]
    broken = [str(error) for error in folders if isinstance(error, EngineError)]
    if options.is_json:
        for folder in whole:
            print(json.dumps({"folder": str(folder.folder), **folder.as_dict()}))
    else:
        print(table(whole) if whole else f"no engines in {root}; see `sdxl build --help`")
    if broken:
        raise EngineError("; ".join(broken))
    return 0


def build_parser() -> Parser:
    parser = Parser(prog="sdxl engines", description="List this machine's TensorRT engines.")
    text = "folder to search (default: where `sdxl build` puts engines)"
    parser.add_argument("root", nargs="?", metavar="DIR", help=text)
    parser.add_argument(
        "--json", action="store_true", dest="is_json", help="one JSON object a line"
    )
    return parser


def table(folders: Sequence[EngineFolder]) -> str:
    rows = [COLUMNS, *(row(folder) for folder in folders)]
    widths = [max(len(r[i]) for r in rows) for i in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(r, widths, strict=True)).rstrip()
        for r in rows
    )


def row(folder: EngineFolder) -> tuple[str, ...]:
    return (
        f"{folder.model} {folder.model_digest[:12]}",
        folder.precision + (" sparse" if folder.is_sparse else ""),
        folder.gpu,
        f"{folder.backend} {folder.backend_version}",
        str(folder.max_batch),
        f"{folder.size / 2**20:.1f}",
        parity(folder),
        str(folder.folder),
    )


def parity(folder: EngineFolder) -> str:
    """Return the PSNR of whole pictures of the plans, or of the export if the plans never ran."""
    if folder.is_run:
        return pictures_of(folder.parity)
    exported = pictures_of(folder.export_parity) or "not checked"
    return f"{folder.parity.get('note') or 'not run'}; export: {exported}"
