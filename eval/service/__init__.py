"""A running service, measured over HTTP: load and sizing."""
