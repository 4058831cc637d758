"""The embedded model: SDXL's topology at a few megabytes, and all that made it."""
