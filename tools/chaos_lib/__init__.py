"""Parts of tools/chaos.py: a proxy that is a bad network, the faults, the roles, and the proof."""
