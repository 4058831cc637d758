"""OpenAI's Files and Batches: a file of requests in, pictures at batch priority, a file out."""
