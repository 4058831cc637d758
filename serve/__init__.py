"""What a person or a client talks to: the command line's renderer now, the service later."""
