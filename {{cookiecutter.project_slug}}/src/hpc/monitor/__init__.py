"""Throughput and MFU, samples of each node, profiles, bandwidth of links."""
