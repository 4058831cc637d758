"""Speed: beside peers, beside the floor, and estimated for other GPUs."""
