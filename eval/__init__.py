"""Quality and speed, measured. It talks HTTP to the service and never imports it."""
