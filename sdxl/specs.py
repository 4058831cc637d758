"""The tensors of every network: name, dtype and dims.

ONNX names and dynamic axes, TensorRT profiles, buffers, run-time checks and the tests' fakes are
derived from this module, which imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from sdxl.single_file import configs

MAX_WIDTH, MAX_LAYERS, MAX_ATTENTIONS = 2**16, 64, 4096
"""bounds of config values, far above any SDXL's"""

Cut = Literal["reference", "fresh_skips"]
CUTS: tuple[Cut, ...] = ("reference", "fresh_skips")
ROWS = "rows"
"""the axis along which a UNet call is padded to a bucket"""
CHUNK = 77
"""CLIP's context length in tokens, with BOS and EOS"""

TIME_IDS, REFINER_TIME_IDS = 6, 5
"""Original height, width, crop top, left, target height, width. A refiner has an aesthetic score
instead of the last two."""

MAY_BE_ZERO = ("clip_l_width", "masked_channels", "guidance_channels")
"""sizes of an Architecture that are 0 if the model lacks the part"""
LEAST_SINUSOIDS = 4
"""the fewest channels of a guidance embedding"""

PAGE_RANK = 16
"""ranks in one page of LoRAs; a LoRA of a higher rank takes several pages"""
PAGE_COUNTS = (1, 2, 4, 8, 16)
"""the possible numbers of pages of a row in a call; others are padded"""
MOST_PAGES = 129
"""pages of a bank; page 0 adds nothing"""
MOST_VECTORS = 1024
"""vectors of embeddings in a bank, for each text encoder; the token id -1 - n is vector n"""
_LORA = {name: f"{name}+lora" for name in ("clip_l", "clip_g", "unet_prompt", "unet_deep")}
_LOCON = {name: f"{name}+locon" for name in ("unet_deep", "unet_shallow")}
VARIANTS: Mapping[str, Mapping[str, str]] = {"lora": _LORA, "locon": {**_LORA, **_LOCON}}
"""Networks with LoRAs by the plain networks that they replace. `lora` adapts the UNet's
transformers, `locon` all its layers."""

CONTROL = "control"
"""suffix of networks that add the residuals of ControlNets"""
CONTROLLED = ("unet_deep", "unet_shallow")
RESIDUAL = "residual_"
"""prefix of the inputs for residuals"""
IMAGE = "image"
"""suffix of networks that attend to image prompts"""
PROMPTED = ("unet_deep",)
IMAGE_KEYS, IMAGE_MASK = "image_text_", "image_mask"
"""prefix of the inputs for image prompts' keys and values, and the name of the mask"""
IMAGE_COUNTS = (1, 2, 4, 8, 16)
"""the possible numbers of image prompts of a row in a call; others are padded"""
IMAGE_TOKENS = (4, 16, 32, 64, 128, 256)
"""the possible numbers of an image prompt's tokens in a call; others are padded"""
LEVEL_AXES = (("latent_h", "latent_w"), ("half_h", "half_w"), ("quarter_h", "quarter_w"))
"""height and width of the maps at each level of the UNet"""

VAE = ("vae_decoder", "vae_encoder")
OPTIONAL = ("vae_encoder",)
"""networks that an old export may lack; without them it makes pictures only from text"""

Dim = int | str
"""a size, or the name of an axis that is free at run time"""
Axes = tuple[tuple[str, int], ...]
"""names and sizes of free axes, as a key"""


@dataclass(frozen=True)
class TensorSpec:
    name: str
    dtype: str
    dims: tuple[Dim, ...]

    @property
    def free_axes(self) -> dict[int, str]:
        return {i: dim for i, dim in enumerate(self.dims) if isinstance(dim, str)}

    def shape(self, axes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(axes[dim] if isinstance(dim, str) else dim for dim in self.dims)


@dataclass(frozen=True)
class ModelSpec:
    """A network's name, inputs and outputs."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    bank: tuple[TensorSpec, ...] = ()
    """inputs that the engine keeps between calls: the pages of LoRAs"""

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return self.all_inputs + self.outputs

    @property
    def all_inputs(self) -> tuple[TensorSpec, ...]:
        return self.inputs + self.bank

    def shared_axes(self, sizes: Mapping[str, int]) -> Axes:
        """Return the axes that all rows of a call have in common: every free input axis except the
        rows, with its size from `sizes`."""
        axes = dict.fromkeys(axis for spec in self.inputs for axis in spec.free_axes.values())
        return tuple((axis, sizes[axis]) for axis in axes if axis != ROWS)

    def axes(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """Return the sizes of the free axes. Raise ShapeError if the shapes do not fit the spec."""
        sizes: dict[str, int] = {}
        for spec in self.inputs:
            if spec.name not in shapes:
                raise ShapeError(f"{self.name}: input {spec.name!r} is missing")
            shape = shapes[spec.name]
            if len(shape) != len(spec.dims) or any(
                size != (sizes.setdefault(dim, size) if isinstance(dim, str) else dim)
                for dim, size in zip(spec.dims, shape, strict=True)
            ):
                raise ShapeError(
                    f"{self.name}: input {spec.name!r} has shape {tuple(shape)}, "
                    f"expected {spec.dims} with {sizes}"
                )
        return sizes


class ShapeError(ValueError):
    """A tensor does not fit its spec."""


def _check_whole(field: str, value: object, most: int = MAX_WIDTH) -> None:
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"{field} is {brief(value)}, expected a whole number from 1 to {most}")


def brief(value: object) -> str:
    """Shorten a value for a message."""
    try:
        return repr(value)[:80]
    except (RecursionError, ValueError):
        # The value is nested too deep, or a number with too many digits.
        return f"a {type(value).__name__} too large to show"


@dataclass(frozen=True)
class Architecture:
    """The sizes of an SDXL, read from a checkpoint's configs."""

    latent_channels: int
    image_channels: int
    vae_scale: int
    stem_channels: int
    """block_out_channels[0]: the width of down_blocks.0 and up_blocks.2"""
    cache_channels: int
    """block_out_channels[1]: the input width of the last up block"""
    stem_layers: int
    embedding_width: int
    """width of the embedding of time, size and pooled prompt"""
    attention_widths: tuple[int, ...]
    """widths of all cross-attentions in the order of calls"""
    clip_l_width: int
    """0: a refiner, which has only the second text encoder"""
    clip_g_width: int
    pooled_width: int
    sample_size: int
    """the latent side of the model's training"""
    masked_channels: int = 0
    """channels of an inpainting UNet besides the latents: the mask, the masked image's latents"""
    guidance_channels: int = 0
    """width of a distilled model's guidance embedding (time_cond_proj_dim)"""

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name not in MAY_BE_ZERO and field.name != "attention_widths":
                _check_whole(field.name, getattr(self, field.name))
        if self.clip_l_width != 0:
            _check_whole("clip_l_width", self.clip_l_width)
        masked, latents = self.masked_channels, self.latent_channels
        if type(masked) is not int or masked not in (0, latents + 1):
            extra = f"has {brief(masked)} channels besides the {latents} latents"
            needed = f"expected none, or {latents + 1} of inpainting"
            raise ValueError(f"the UNet's input {extra}; {needed}")
        guidance = self.guidance_channels
        if type(guidance) is not int or (guidance and not LEAST_SINUSOIDS <= guidance <= MAX_WIDTH):
            needed = f"must be none, or a whole number from {LEAST_SINUSOIDS} to {MAX_WIDTH}"
            raise ValueError(f"time_cond_proj_dim is {brief(guidance)}, {needed}")
        _check_whole("stem_layers", self.stem_layers, MAX_LAYERS)
        if not 0 < len(self.attention_widths) <= MAX_ATTENTIONS:
            raise ValueError(
                f"{len(self.attention_widths)} cross-attentions, at most {MAX_ATTENTIONS}"
            )
        for width in self.attention_widths:
            _check_whole("attention_widths", width)

    @classmethod
    def from_configs(
        cls,
        unet: Mapping[str, Any],
        vae: Mapping[str, Any],
        clip_l: Mapping[str, Any] | None,
        clip_g: Mapping[str, Any],
    ) -> Architecture:
        """Read the configs of a checkpoint. A refiner has no `clip_l`."""
        _check_levels(unet, vae)
        return cls(
            latent_channels=vae["latent_channels"],
            image_channels=vae["out_channels"],
            vae_scale=2 ** (len(vae["block_out_channels"]) - 1),
            stem_channels=unet["block_out_channels"][0],
            cache_channels=unet["block_out_channels"][1],
            stem_layers=unet["layers_per_block"],
            embedding_width=4 * unet["block_out_channels"][0],
            attention_widths=_attention_widths(unet),
            clip_l_width=clip_l["hidden_size"] if clip_l is not None else 0,
            clip_g_width=clip_g["hidden_size"],
            pooled_width=clip_g["projection_dim"],
            sample_size=unet["sample_size"],
            masked_channels=unet["in_channels"] - vae["latent_channels"],
            guidance_channels=unet.get("time_cond_proj_dim") or 0,
        )

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Architecture:
        """Read from JSON, which has no tuples."""
        return cls(**{**value, "attention_widths": tuple(value["attention_widths"])})

    @property
    def embeds_guidance(self) -> bool:
        """True if guidance is an input of the model, which needs no negative rows."""
        return self.guidance_channels > 0

    @property
    def is_refiner(self) -> bool:
        return self.clip_l_width == 0

    @property
    def context_width(self) -> int:
        return self.clip_l_width + self.clip_g_width

    @property
    def deepest_channels(self) -> int:
        """block_out_channels[2], the width of cross-attentions below the second level."""
        others = (width for width in self.attention_widths if width != self.cache_channels)
        return next(others, self.cache_channels)

    @property
    def default_side(self) -> int:
        return self.sample_size * self.vae_scale


@dataclass(frozen=True)
class ControlArchitecture:
    """The sizes that differ among the ControlNets of one model."""

    attention_widths: tuple[int, ...]
    """widths of all cross-attentions in the order of calls; small ControlNets have few or none"""
    types: int = 0
    """number of a union's types of hints; 0: not a union"""


def _check_levels(unet: Mapping[str, Any], vae: Mapping[str, Any]) -> None:
    """Check the config values from which the other sizes are computed."""
    _check_whole("layers_per_block", unet["layers_per_block"], MAX_LAYERS)
    depths = unet["transformer_layers_per_block"]
    for name, values in (
        ("block_out_channels", unet["block_out_channels"]),
        ("block_out_channels of the VAE", vae["block_out_channels"]),
        ("transformer_layers_per_block", [depths] if isinstance(depths, int) else depths),
    ):
        if not isinstance(values, list | tuple) or not 1 <= len(values) <= 8:
            raise ValueError(f"{name} is {brief(values)}, expected a list of 1 to 8 numbers")
        most = MAX_LAYERS if name.startswith("transformer") else MAX_WIDTH
        for value in values:
            # A level without attention has a depth of 0.
            _check_whole(name, value or 1, most)


def _attention_widths(unet: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the widths in the order down, middle, up. Each level up has one more block than down.
    The middle block has attention even if the last level has none."""
    widths, layers = unet["block_out_channels"], unet["layers_per_block"]
    depths = unet["transformer_layers_per_block"]
    if isinstance(depths, int):
        depths = [depths] * len(widths)
    kinds = unet["down_block_types"]
    levels = [
        (width, depth)
        for width, depth, kind in zip(widths, depths, kinds, strict=True)
        if kind == "CrossAttnDownBlock2D"
    ]
    down = [width for width, depth in levels for _ in range(layers * depth)]
    middle = [widths[-1]] * depths[-1]
    up = [width for width, depth in reversed(levels) for _ in range((layers + 1) * depth)]
    return (*down, *middle, *up)


SDXL_1_0 = Architecture.from_configs(
    *(configs.SDXL_1_0[part] for part in ("unet", "vae", "text_encoder", "text_encoder_2"))
)


def network_specs(
    arch: Architecture, dtype: str = "float32", cut: Cut = "reference"
) -> dict[str, ModelSpec]:
    """Return the seven networks by name; a refiner has no `clip_l`. `dtype` is the dtype of
    activations; timesteps are always float32."""

    def tensor(name: str, *dims: Dim) -> TensorSpec:
        return TensorSpec(name, dtype, dims)

    token_ids = TensorSpec("token_ids", "int64", ("chunks", CHUNK))
    channels = arch.latent_channels + arch.masked_channels
    sample = tensor("sample", "rows", channels, "latent_h", "latent_w")
    timestep = TensorSpec("timestep", "float32", ("rows",))
    context = tensor("context", "rows", "tokens", arch.context_width)
    pooled = tensor("pooled", "rows", arch.pooled_width)
    time_ids = tensor("time_ids", "rows", REFINER_TIME_IDS if arch.is_refiner else TIME_IDS)
    noise = tensor("noise", "rows", arch.latent_channels, "latent_h", "latent_w")
    cache = cache_specs(arch, dtype, cut)
    added = tensor("added", "rows", arch.embedding_width)
    embedding, condition = [], []
    if arch.guidance_channels:
        embedding = [tensor("guidance_embedding", "rows", arch.guidance_channels)]
        condition = [tensor("condition", "rows", arch.stem_channels)]
    latents = tensor("latents", "batch", arch.latent_channels, "latent_h", "latent_w")
    deviation = replace(latents, name="deviation")
    image = tensor("image", "batch", arch.image_channels, "image_h", "image_w")
    text = text_specs(arch.attention_widths, dtype)
    models = (
        ModelSpec(
            "clip_l", (token_ids,), (tensor("hidden_l", "chunks", CHUNK, arch.clip_l_width),)
        ),
        ModelSpec(
            "clip_g",
            (token_ids,),
            (
                tensor("hidden_g", "chunks", CHUNK, arch.clip_g_width),
                tensor("pooled_g", "chunks", arch.pooled_width),
            ),
        ),
        ModelSpec(
            "unet_prompt", (context, pooled, time_ids, *embedding), (added, *condition, *text)
        ),
        ModelSpec("unet_deep", (sample, timestep, added, *condition, *text), (noise, *cache)),
        ModelSpec("unet_shallow", (sample, timestep, added, *condition, *cache), (noise,)),
        ModelSpec("vae_decoder", (latents,), (image,)),
        ModelSpec("vae_encoder", (image,), (replace(latents, name="mean"), deviation)),
    )
    return {model.name: model for model in models[arch.is_refiner :]}


def layer_name(part: str, name: str) -> str:
    """Return a layer's name in a bank, without `text_model`, which only some versions of
    transformers and some files have."""
    return f"{part}.{name.removeprefix('text_model.')}"


def plain_name(network: str) -> str:
    """Return the name of the network without LoRAs, ControlNets and image prompts."""
    return network.partition("+")[0]


def lora_name(network: str) -> str:
    """Return the name of the network without ControlNets and image prompts."""
    return network.removesuffix(f"+{IMAGE}").removesuffix(f"+{CONTROL}")


def with_loras(specs: Mapping[str, ModelSpec]) -> dict[str, ModelSpec]:
    """Return the networks of VARIANTS: each row also has pages of LoRAs with a scale for each."""
    variants = {}
    for name in dict.fromkeys(name for each in VARIANTS.values() for name in each.values()):
        spec = specs[plain_name(name)]
        rows = spec.inputs[0].dims[0]
        pages = TensorSpec("pages", "int64", (rows, "pages"))
        scales = TensorSpec("scales", "float32", (rows, "pages"))
        variants[name] = ModelSpec(name, (*spec.inputs, pages, scales), spec.outputs)
    return variants


def text_specs(
    widths: tuple[int, ...],
    dtype: str,
    prefix: str = "",
    dims: tuple[Dim, ...] = ("rows", "tokens"),
) -> tuple[TensorSpec, ...]:
    """Return a prompt's keys and values for cross-attentions of these widths."""
    return tuple(
        TensorSpec(f"{prefix}{kind}_{layer}", dtype, (*dims, width))
        for layer, width in enumerate(widths)
        for kind in ("keys", "values")
    )


def image_specs(arch: Architecture, dtype: str) -> tuple[TensorSpec, ...]:
    """Return the inputs of Deep for image prompts: keys and values of each prompt's tokens, and a
    mask, 0 for tokens and -inf for padding. A row without image prompts has values of 0."""
    dims = ("rows", "images", "image_tokens")
    return (
        *text_specs(arch.attention_widths, dtype, IMAGE_KEYS, dims),
        TensorSpec(IMAGE_MASK, dtype, dims),
    )


def with_images(specs: Mapping[str, ModelSpec], arch: Architecture) -> dict[str, ModelSpec]:
    """Return the networks in `specs` with the inputs of image prompts."""
    variants = {}
    for name, spec in specs.items():
        if plain_name(name) in PROMPTED:
            images = image_specs(arch, spec.outputs[0].dtype)
            variant = f"{name}+{IMAGE}"
            variants[variant] = replace(spec, name=variant, inputs=(*spec.inputs, *images))
    return variants


def variants_of(specs: Mapping[str, ModelSpec], arch: Architecture) -> dict[str, ModelSpec]:
    """Return the networks in `specs` with the inputs of ControlNets, image prompts or both."""
    controlled = with_residuals(specs, arch)
    return controlled | with_images({**specs, **controlled}, arch)


def residual_specs(arch: Architecture, dtype: str) -> tuple[TensorSpec, ...]:
    """Return the residuals for each skip from conv_in's on, and for the middle block."""
    stem, cache, deepest = arch.stem_channels, arch.cache_channels, arch.deepest_channels
    layers = arch.stem_layers
    first = [(0, stem)] * (1 + layers) + [(1, stem)]
    second = [(1, cache)] * layers + [(2, cache)]
    places = [*first, *second, *[(2, deepest)] * (layers + 1)]
    return tuple(
        TensorSpec(f"{RESIDUAL}{index}", dtype, ("rows", channels, *LEVEL_AXES[level]))
        for index, (level, channels) in enumerate(places)
    )


def with_residuals(specs: Mapping[str, ModelSpec], arch: Architecture) -> dict[str, ModelSpec]:
    """Return the networks in `specs` with inputs for ControlNets' residuals: Deep adds all,
    Shallow only those of the skips that it computes."""
    variants = {}
    for name, spec in specs.items():
        plain = plain_name(name)
        if plain in CONTROLLED:
            kept = len(specs[plain].inputs)
            residuals = residual_specs(arch, specs[plain].outputs[0].dtype)
            if plain == "unet_shallow":
                _, *cache = specs["unet_deep"].outputs
                residuals = residuals[: 1 + arch.stem_layers if len(cache) == 1 else 1]
            inputs = (*spec.inputs[:kept], *residuals, *spec.inputs[kept:])
            variant = f"{name}+{CONTROL}"
            variants[variant] = replace(spec, name=variant, inputs=inputs)
    return variants


def control_specs(
    arch: Architecture, control: ControlArchitecture, dtype: str = "float32"
) -> dict[str, ModelSpec]:
    """Return a ControlNet's two networks by name."""

    def tensor(name: str, *dims: Dim) -> TensorSpec:
        return TensorSpec(name, dtype, dims)

    unet = network_specs(arch, dtype)
    _, timestep, added, *_ = unet["unet_deep"].inputs
    prompt = unet["unet_prompt"].inputs[:3]
    image = (arch.image_channels, "image_h", "image_w")
    # One picture, or one for each row; the rows of a picture have the same hint.
    hints = [tensor("hint", "pictures", *image)]
    if control.types:
        scales = TensorSpec("hint_scales", "float32", ("pictures", "hints"))
        types = tensor("hint_types", "pictures", "hints", control.types)
        hints = [tensor("hints", "pictures", "hints", *image), types, scales]
    hint = tensor("control_hint", "rows", arch.stem_channels, *LEVEL_AXES[0])
    ready = (
        replace(added, name="control_added"),
        *text_specs(control.attention_widths, dtype, "control_"),
    )
    # Only the latents, also for an inpainting UNet.
    sample = tensor("sample", "rows", arch.latent_channels, *LEVEL_AXES[0])
    residuals = residual_specs(arch, dtype)
    strengths = TensorSpec("strengths", "float32", ("rows", len(residuals)))
    models = (
        ModelSpec(
            "control_prompt",
            (*prompt, *hints),
            (replace(hint, dims=("pictures", *hint.dims[1:])), *ready),
        ),
        ModelSpec("control_deep", (sample, timestep, strengths, hint, *ready), residuals),
    )
    return {model.name: model for model in models}


def cache_specs(arch: Architecture, dtype: str, cut: Cut) -> tuple[TensorSpec, ...]:
    """Return the tensors that a deep step caches for shallow ones; they define the cut."""

    def tensor(name: str, channels: int) -> TensorSpec:
        return TensorSpec(name, dtype, ("rows", channels, "latent_h", "latent_w"))

    if cut == "fresh_skips":
        return (tensor("cache_up", arch.cache_channels),)
    skips = (f"cache_skip{i}" for i in range(arch.stem_layers - 1))
    names = ("cache_hidden", "cache_past", *skips)
    return tuple(tensor(name, arch.stem_channels) for name in names)


def level_axes(latent_h: int, latent_w: int) -> dict[str, int]:
    """Return the axes of the maps at each level from the latents' axes."""
    sides = (latent_h, latent_w)
    return {
        axis: -(-side // 2**level)
        for level, axes in enumerate(LEVEL_AXES)
        for axis, side in zip(axes, sides, strict=True)
    }


def image_axes(arch: Architecture, latent_h: int, latent_w: int) -> dict[str, int]:
    """Return the VAE's image axes from the latent axes."""
    return {"image_h": latent_h * arch.vae_scale, "image_w": latent_w * arch.vae_scale}


def latent_axes(arch: Architecture, image_h: int, image_w: int) -> dict[str, int]:
    """Return the latent axes from the image axes."""
    return {"latent_h": image_h // arch.vae_scale, "latent_w": image_w // arch.vae_scale}
