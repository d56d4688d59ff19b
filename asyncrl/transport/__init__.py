"""Frames between processes: addresses, sockets, and the file by which roles find each other.

Knows bytes and peers, nothing of what a frame means.
"""
