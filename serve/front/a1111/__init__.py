"""stable-diffusion-webui's API, as far as this service supports it."""

PREFIX = "/sdapi/v1"
WITH_PICTURES = (f"{PREFIX}/img2img", f"{PREFIX}/png-info")
"""Routes whose requests hold pictures."""
