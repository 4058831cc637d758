"""A language model behind the REST API: its speed, and its fastest options."""
