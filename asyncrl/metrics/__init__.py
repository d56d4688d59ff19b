"""Records of numbers, their names, and where they are written. Imports no torch."""
