"""A running service, measured from outside: load, delays, low priority, languages, traces."""
