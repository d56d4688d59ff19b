"""`asyncrl samples`: what a run was trained on, in the terminal and as a page."""
