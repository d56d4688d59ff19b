"""What talks to SGLang servers: their HTTP API, replies and routes, weight updates, and the server processes."""
