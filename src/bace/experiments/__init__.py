"""Runs: put together from settings, kept in folders, compared, asked for predictions."""
