"""A language model behind the REST API: its speed, and the options that make it fastest."""
