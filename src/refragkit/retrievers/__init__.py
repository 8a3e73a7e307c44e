"""Indexes, search and the multi-hop loop."""
