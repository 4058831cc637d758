"""A running service, measured from outside: load, marking, sizing; and a double of SDXL."""
