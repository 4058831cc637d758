"""The HTTP front: REST in OpenAI's words, the web page, and what stands around every request."""
