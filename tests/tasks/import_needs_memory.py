"""A module that wants more memory than a worker has while it is imported."""

raise MemoryError("of a library")
