"""Batched sampling with state."""
