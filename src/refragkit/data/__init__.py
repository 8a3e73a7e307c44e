"""Tokenizers, files, rendering and batches."""
