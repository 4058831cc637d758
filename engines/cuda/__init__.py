"""What every backend needs of a GPU: its identity, streams and recordings."""
