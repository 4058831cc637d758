"""The seven networks as torch modules whose arguments and results are the tensors of specs.py."""
