"""Parts of tools/staleness_study.py."""
