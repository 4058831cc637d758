"""Exports and engines on disk: their descriptions, places and digests."""
