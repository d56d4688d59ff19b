"""Models: loading, routes (capture and replay), log-probs, checkpoint names, description."""
