"""Encodes prompts with both text encoders to the UNet's conditioning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from sdxl.adapters import NO_ADAPTERS, Adapters, Pages, lora_inputs
from sdxl.engine import Engine, Engines, call, torch_dtype
from sdxl.flight import PLAIN, Variant
from sdxl.image_inputs import ImageInput
from sdxl.params import GenerationParams
from sdxl.prompt import MAX_TOKENS, Learned, Tokenizer, Tokens, tokenize
from sdxl.specs import REFINER_TIME_IDS, Architecture

MAX_CHUNKS_PER_CALL = 32
AESTHETIC_SCORES = (6.0, 2.5)
"""a refiner's inputs for the positive and the negative row, as in diffusers"""

Chunk = tuple[int, ...]
TokenRow = tuple[Tokens, Tokens] | None
"""A prompt in both tokenizers' ids; None: a negative prompt of zeros, as in diffusers."""


@dataclass(frozen=True)
class Conditioning:
    """The UNet's conditioning of one request: a positive row, with guidance also a negative one."""

    context: Tensor
    """[rows, tokens, context width]"""
    pooled: Tensor
    """[rows, pooled width]"""
    time_ids: Tensor
    """[rows, 6]; of a refiner [rows, 5]"""
    guidance_embedding: Tensor | None = None
    """[rows, channels], for a UNet with a guidance embedding"""
    adapters: Adapters = NO_ADAPTERS
    images: tuple[ImageInput, ...] = ()
    """image prompts"""
    refined: Conditioning | None = None
    """the refiner's conditioning, if the request names the refiner"""

    @property
    def tokens(self) -> int:
        return self.context.shape[1]

    @property
    def rows(self) -> int:
        return self.context.shape[0]

    @property
    def tensors(self) -> list[Tensor]:
        own = [each for each in vars(self).values() if isinstance(each, Tensor)]
        own += [tensor for image in self.images for tensor in image.text]
        return own + self.refined.tensors if self.refined else own

    def sized(self, height: int, width: int) -> Conditioning:
        """Return the conditioning for another size."""
        is_refiner = self.time_ids.shape[1] == REFINER_TIME_IDS
        ids = _time_ids(height, width, self.rows, is_refiner=is_refiner)
        refined = self.refined and self.refined.sized(height, width)
        return replace(self, time_ids=ids.to(self.time_ids), refined=refined)


def encode(
    requests: Sequence[GenerationParams],
    prompts: Sequence[Sequence[TokenRow]],
    engines: Engines,
    adapters: Sequence[Adapters] = (),
    *,
    fixed_chunks: int | None = None,
) -> list[Conditioning]:
    """Encode resolved requests; `prompts` are the results of `tokenize_rows`. Equal chunks of
    requests with the same LoRAs are encoded once. `fixed_chunks` pads every call to that many
    chunks, so that a prompt's bytes do not depend on other prompts."""
    if not requests:
        return []
    adapters = adapters or [NO_ADAPTERS] * len(requests)
    prompts = [_in_bank(rows, loaded) for rows, loaded in zip(prompts, adapters, strict=True)]
    by_pages: dict[Pages, list[tuple[Tokens, Tokens]]] = {}
    for prompt, loaded in zip(prompts, adapters, strict=True):
        by_pages.setdefault(loaded.in_text, []).extend(row for row in prompt if row is not None)
    size = fixed_chunks or MAX_CHUNKS_PER_CALL

    def encoded_by(name: str, index: int) -> dict[Pages, _Encoded]:
        encoded = {}
        for pages, rows in by_pages.items():
            unique = list(dict.fromkeys(chunk for row in rows for chunk in row[index].ids))
            encoded[pages] = _Encoded.of(name, engines, unique, pages, size, fixed_chunks)
        return encoded

    by_l = {} if engines.arch.is_refiner else encoded_by("clip_l", 0)
    by_g = encoded_by("clip_g", 1)
    dtypes = {spec.name: torch_dtype(spec) for spec in engines["unet_prompt"].spec.inputs}
    conditionings = []
    for request, prompt, loaded in zip(requests, prompts, adapters, strict=True):
        encoded = by_l.get(loaded.in_text), by_g[loaded.in_text]
        conditioning = _condition(request, prompt, *encoded, dtypes, engines.arch)
        conditionings.append(replace(conditioning, adapters=loaded))
    return conditionings


def tokenize_rows(
    request: GenerationParams,
    tokenizers: tuple[Tokenizer, Tokenizer],
    force_zeros: bool,
    most: int = MAX_TOKENS,
    *,
    embeds_guidance: bool = False,
    learned: Learned | None = None,
) -> list[TokenRow]:
    """Return a request's rows, padded to one length. Raise InvalidParams for text that cannot be
    encoded or has more than `most` tokens."""

    def row(text: str, field: str) -> TokenRow:
        first, second = (tokenize(text, each, field, most, learned) for each in tokenizers)
        return first, second

    rows: list[TokenRow] = [row(request.prompt, "prompt")]
    if request.is_guided and not embeds_guidance:
        negative = request.negative_prompt
        # As in diffusers: only a missing negative prompt is zeroed; an empty one is encoded.
        if negative is None and force_zeros:
            rows.append(None)
        else:
            rows.append(row(negative or "", "negative_prompt"))
    longest = max(len(tokens.ids) for pair in rows if pair for tokens in pair)
    return [pair and (pair[0].pad_to(longest), pair[1].pad_to(longest)) for pair in rows]


def _in_bank(rows: Sequence[TokenRow], adapters: Adapters) -> list[TokenRow]:
    """Replace the ids of embeddings' vectors by the vectors' numbers in the bank."""
    if not adapters.vectors:
        return list(rows)

    def placed(tokens: Tokens) -> Tokens:
        ids = [[i if i >= 0 else -1 - adapters.vectors[-1 - i] for i in c] for c in tokens.ids]
        return replace(tokens, ids=tuple(map(tuple, ids)))

    return [row and (placed(row[0]), placed(row[1])) for row in rows]


@dataclass(frozen=True)
class _Encoded:
    """One encoder's outputs for a set of chunks."""

    place: Mapping[Chunk, int]
    hidden: Tensor
    """[chunks, 77, width]"""
    pooled: Tensor | None
    """[chunks, width], only of the second encoder"""

    @classmethod
    def of(
        cls,
        name: str,
        engines: Engines,
        chunks: Sequence[Chunk],
        pages: Pages,
        size: int,
        fixed: int | None,
    ) -> _Encoded:
        encoder = engines.of(name, Variant("lora", pages.count) if pages.count else PLAIN)
        groups = [chunks[i : i + size] for i in range(0, len(chunks), size)]
        outputs = [_run(encoder, engines, group, pages, fixed) for group in groups]
        hidden, *pooled = (spec.name for spec in encoder.spec.outputs)
        return cls(
            place={chunk: i for i, chunk in enumerate(chunks)},
            hidden=torch.cat([output[hidden] for output in outputs]),
            pooled=torch.cat([output[pooled[0]] for output in outputs]) if pooled else None,
        )

    def context(self, tokens: Tokens) -> Tensor:
        """Return [77 * chunks, width]."""
        hidden = self.hidden[[self.place[chunk] for chunk in tokens.ids]]
        if any(weight != 1 for chunk in tokens.weights for weight in chunk):
            hidden = emphasise(hidden, tokens.weights)
        return hidden.flatten(0, 1)


def _run(
    encoder: Engine,
    engines: Engines,
    chunks: Sequence[Chunk],
    pages: Pages,
    fixed: int | None,
) -> dict[str, Tensor]:
    filler = [chunks[0]] * ((fixed or 0) - len(chunks))
    ids = torch.tensor([*chunks, *filler], dtype=torch.int64)
    inputs = {"token_ids": ids}
    if pages.count:
        inputs |= lora_inputs([pages] * len(ids), pages.count)
    inputs = {name: tensor.to(engines.device) for name, tensor in inputs.items()}
    outputs = call(encoder, engines.arch, inputs)
    return {name: value[: len(chunks)] for name, value in outputs.items()}


def emphasise(hidden: Tensor, weights: Sequence[Sequence[float]]) -> Tensor:
    """Scale each token's embedding by its weight, then restore the mean of each encoder's chunk, as
    stable-diffusion-webui does for SDXL. The pooled embedding does not change."""
    exact = hidden.float()
    weighted = exact * torch.tensor(weights, device=hidden.device)[..., None]
    before, after = (t.mean(dim=(1, 2), keepdim=True) for t in (exact, weighted))
    restored = weighted * torch.where(after == 0, 1.0, before / after)
    return restored.to(hidden.dtype)


def _condition(
    request: GenerationParams,
    rows: Sequence[TokenRow],
    encoded_l: _Encoded | None,
    encoded_g: _Encoded,
    dtypes: Mapping[str, torch.dtype],
    arch: Architecture,
) -> Conditioning:
    assert encoded_g.pooled is not None
    contexts: list[Tensor] = []
    pooled: list[Tensor] = []
    for row in rows:
        if row is None:
            contexts.append(torch.zeros_like(contexts[0]))
            pooled.append(torch.zeros_like(pooled[0]))
            continue
        both = [encoded_g.context(row[1])]
        if encoded_l is not None:
            both.insert(0, encoded_l.context(row[0]))
        contexts.append(torch.cat(both, dim=-1))
        pooled.append(encoded_g.pooled[encoded_g.place[row[1].ids[0]]])
    assert request.height and request.width, "expected a resolved request"
    size = request.height, request.width
    time_ids = _time_ids(*size, len(rows), is_refiner=arch.is_refiner).to(dtypes["time_ids"])
    device, embedding = encoded_g.hidden.device, None
    if arch.embeds_guidance:
        row_of = embedded(request.guidance, arch.guidance_channels)[None]
        embedding = row_of.to(device, dtypes["guidance_embedding"])
    return Conditioning(
        context=torch.stack(contexts).to(dtypes["context"]),
        pooled=torch.stack(pooled).to(dtypes["pooled"]),
        time_ids=time_ids.to(device),
        guidance_embedding=embedding,
    )


def _time_ids(height: int, width: int, rows: int, *, is_refiner: bool) -> Tensor:
    if is_refiner:
        scores = AESTHETIC_SCORES[:rows]
        return torch.tensor([[height, width, 0, 0, score] for score in scores])
    return torch.tensor([[height, width, 0, 0, height, width]] * rows)


def embedded(guidance: float, channels: int) -> Tensor:
    """Return [channels]: sines and cosines of guidance - 1 (LCM, arXiv:2310.04378). Order and
    rounding are diffusers': for angles in the thousands the last digit matters."""
    half = channels // 2
    steps = torch.log(torch.tensor(10000.0)) / (half - 1)
    angles = torch.tensor(guidance - 1) * 1000.0 * torch.exp(torch.arange(half).float() * -steps)
    return pad(torch.cat([torch.sin(angles), torch.cos(angles)]), (0, channels % 2))
