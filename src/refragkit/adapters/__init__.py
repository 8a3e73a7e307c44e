"""Parameter-efficient adapters."""
