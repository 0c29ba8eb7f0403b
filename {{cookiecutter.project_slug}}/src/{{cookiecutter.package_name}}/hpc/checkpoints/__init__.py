"""Saved and read: whole or absent, never executed."""
