"""stable-diffusion-webui's API, as far as there is something behind it."""
