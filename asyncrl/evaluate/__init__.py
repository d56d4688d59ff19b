"""`asyncrl eval`: a model measured on held-out prompts, without a run."""
