"""Sequence-mixing and loss kernels, each beside its step-by-step reference."""
