"""The embedded model: SDXL's topology in a few megabytes, and its data set."""
