"""What any backend asks of a GPU: which there is, streams, recordings."""
