"""Packed files, staging, batches fetched ahead."""
