"""One device's worth of the service: orders in, pictures out. HTTP is not known here."""
