"""The model's networks as torch modules, whose arguments and results specs.py describes."""
