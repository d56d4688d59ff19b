"""Names of the two matrices that a tied model shares. Imports nothing: processes without a model read it."""

HEAD = "lm_head.weight"
"""The output matrix, which a tied checkpoint leaves out."""
EMBEDDING = "model.embed_tokens.weight"
"""The embeddings, which then stand for it."""
