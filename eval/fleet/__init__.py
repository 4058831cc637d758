"""A fleet of any size, simulated with the service's own decisions."""
