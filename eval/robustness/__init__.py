"""A service under overload, disconnecting clients, invalid requests and killed processes."""
