"""Carriers that bring a published version from the learner to the generators."""
