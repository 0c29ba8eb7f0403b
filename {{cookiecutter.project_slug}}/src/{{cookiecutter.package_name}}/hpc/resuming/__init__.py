"""Stopping and going on without losing a step."""
