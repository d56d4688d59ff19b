"""`asyncrl drift`: what router drift is made of in the responses that a run trained on, from its dumps."""
