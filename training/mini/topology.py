"""Small versions of SDXL's networks, a few megabytes: configurations and new networks."""

from __future__ import annotations

from diffusers import AutoencoderKL, EulerDiscreteScheduler, UNet2DConditionModel
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    ResNetConfig,
    ResNetForImageClassification,
)

from sdxl.mini.scenes import SIDE
from sdxl.single_file.configs import END
from sdxl.specs import CHUNK
from training.mini.vocabulary import build_vocabulary

LATENT_CHANNELS = 4
LATENT_SIDE = SIDE // 8
TEXT_WIDTH = 64
TIME_IDS = (SIDE, SIDE, 0, 0, SIDE, SIDE)  # original size, crop corner, target size
_TIME_ID_WIDTH = 32
# Groups have at least four channels, as in SDXL. With one channel, a norm removes a picture's
# brightness, and a decoder stores it in one very bright spot (arXiv 1912.04958).
VAE_GROUPS = 4
UNET_GROUPS = 8
SCORER_WIDTH = 128


def _text_config(width: int, activation: str, pad: str) -> CLIPTextConfig:
    vocabulary = build_vocabulary()
    eos = vocabulary[END]
    return CLIPTextConfig(
        vocab_size=len(vocabulary),
        hidden_size=width,
        intermediate_size=4 * width,
        projection_dim=width,
        # SDXL reads hidden_states[-2], so two of these layers compute the context.
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=CHUNK,
        hidden_act=activation,
        bos_token_id=eos - 1,
        eos_token_id=eos,
        pad_token_id=vocabulary[pad],
    )


def new_text_encoder() -> CLIPTextModel:
    return CLIPTextModel(_text_config(TEXT_WIDTH, "quick_gelu", END))


def new_text_encoder_2() -> CLIPTextModelWithProjection:
    return CLIPTextModelWithProjection(_text_config(TEXT_WIDTH, "gelu", "!"))


def new_unet() -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=LATENT_SIDE,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=(32, 64, 80),
        layers_per_block=2,
        transformer_layers_per_block=[1, 1, 2],
        attention_head_dim=[2, 4, 5],  # heads, not their width: SDXL's misnomer
        norm_num_groups=UNET_GROUPS,
        cross_attention_dim=2 * TEXT_WIDTH,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=_TIME_ID_WIDTH,
        projection_class_embeddings_input_dim=TEXT_WIDTH + len(TIME_IDS) * _TIME_ID_WIDTH,
    )


def new_vae() -> AutoencoderKL:
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(16, 32, 64, 64),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=VAE_GROUPS,
        sample_size=SIDE,
        force_upcast=False,
    )


def new_scorer_text() -> CLIPTextModelWithProjection:
    return CLIPTextModelWithProjection(_text_config(SCORER_WIDTH, "gelu", END))


def new_scorer_vision() -> ResNetForImageClassification:
    """Make the ResNet. Its "classes" are the dimensions of the space shared with the text."""
    config = ResNetConfig(
        embedding_size=32,
        hidden_sizes=[32, 64, 128, SCORER_WIDTH],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        num_labels=SCORER_WIDTH,
    )
    return ResNetForImageClassification(config)


def new_scheduler() -> EulerDiscreteScheduler:
    """Make SDXL's own scheduler: a scaled linear schedule, noise prediction, leading steps."""
    return EulerDiscreteScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        num_train_timesteps=1000,
        prediction_type="epsilon",
        timestep_spacing="leading",
        steps_offset=1,
    )
