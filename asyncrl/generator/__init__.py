"""The generator role: lease, generate, score, push, load."""
