"""Digests of the LoRAs, embeddings, ControlNets, IP-Adapters and the refiner that rows name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import engines
from sdxl.catalogue import AdapterFile, Catalogue
from sdxl.params import GenerationParams, InvalidParams
from serve.batch.batch_spec import BatchSpec
from serve.batch.rows import ShardPiece

KINDS = {"lora": "LoRA", "embedding": "embedding", "control": "ControlNet", "image": "IP-Adapter"}


def catalogue_for(order: BatchSpec) -> Catalogue:
    from sdxl.checkpoint import find

    folder = find(order.model).folder
    folders = order.lora_folder, order.control_folder, order.image_folder
    return engines.catalogue_of(order.model, folder, *folders)


def refiner_file(order: BatchSpec) -> dict[str, str]:
    """Return the digest of the refiner that the job loads; empty without one."""
    from engines.folders.digests import model_digest
    from sdxl.checkpoint import find_refiner

    name = order.parameters.get("refiner")
    if name is None:
        return {}
    checkpoint = find_refiner(name)
    return {f"refiner {checkpoint.name!r}": model_digest(checkpoint)}


def files_in(piece: ShardPiece, catalogue: Catalogue) -> dict[str, str]:
    files = (each for row in piece.rows if row.params for each in _named_in(row.params, catalogue))
    return {f"{KINDS[each.kind]} {each.name!r}": each.sha256 for each in files}


def _named_in(params: GenerationParams, catalogue: Catalogue) -> Iterator[AdapterFile]:
    """Yield the files that exist; a worker refuses rows that name others."""
    texts = {"prompt": params.prompt, "negative_prompt": params.negative_prompt or ""}
    with suppress(InvalidParams):
        for lora in params.loras or ():
            yield catalogue.find("lora", lora.name)
        for control in params.controls or ():
            yield catalogue.find("control", control.name)
        for prompt in params.image_prompts or ():
            yield catalogue.find("image", prompt.name)
        yield from catalogue.embeddings_in(texts)
