"""Curves, throughput, use of the node and its GPUs."""
