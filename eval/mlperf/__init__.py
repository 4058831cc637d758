"""MLPerf's LoadGen around the engines or a service."""
