"""Bandwidth between GPUs and nodes."""
