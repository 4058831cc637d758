"""A running service, measured from outside: load and sizing; and a double of SDXL."""
