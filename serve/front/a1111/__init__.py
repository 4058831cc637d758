"""stable-diffusion-webui's API, as far as there is something behind it."""

PREFIX = "/sdapi/v1"
WITH_PICTURES = (f"{PREFIX}/img2img", f"{PREFIX}/png-info")
"""whose requests hold pictures"""
