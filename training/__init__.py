"""What trains the embedded models. It is not in the wheel."""
