"""One device of the service: orders in, pictures out. It knows no HTTP."""
