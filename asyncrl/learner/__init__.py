"""The learner role: take, collate, score, drift, select, update, commit, publish."""
