"""Runs: how they are made from settings, kept in folders and compared."""
