"""Throughput and MFU, samples of each node, profiles of steps.

Offers the callbacks Monitor, Throughput and Profile that configs/callbacks names, and readers of what runs write:
`event_files` for curves, `node_usage` for samples of nodes and phases. Needs run, jobs, training and resume.
"""
