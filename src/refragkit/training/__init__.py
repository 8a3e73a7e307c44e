"""Optimisers, schedules and callbacks."""
