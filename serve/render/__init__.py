"""`sdxl render`: text to picture files, without a service."""
