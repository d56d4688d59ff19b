"""A module of the user's that cannot be imported."""

print("importing")
raise ImportError("a library is missing")
