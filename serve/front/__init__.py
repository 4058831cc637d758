"""The HTTP front ends: OpenAI's REST APIs, the web page, and the middleware around requests."""
