"""Rewards on what the model generated."""
