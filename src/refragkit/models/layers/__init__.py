"""Blocks and their parts."""
