"""Errors that a user can act on: one message that names the file, line or key and what to do."""

from __future__ import annotations


class RefragError(Exception):
    """Base of every error whose message is meant for the user; shown without a traceback."""


class ConfigError(RefragError):
    """A configuration that can't be composed, or asks for something contradictory."""


class DataError(RefragError):
    """A data file that is missing, empty, broken or inconsistent."""


class RetrievalError(RefragError):
    """An index or encoder that is missing, broken or does not match what the run asks for."""


class CheckpointError(RefragError):
    """A checkpoint or export that is missing, broken or does not fit the model."""
