"""The training of the embedded models. It is not in the wheel."""
