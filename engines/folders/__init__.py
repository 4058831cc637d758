"""Exports and engines on disk: what is in them, where they lie, and whether it is what it was."""
