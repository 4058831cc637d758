"""The seven networks, and a ControlNet's two, as torch modules whose arguments and results are the
tensors of specs.py."""
