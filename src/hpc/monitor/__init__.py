"""Throughput and MFU, samples of each node, profiles, bandwidth of links.

Offers the callbacks Monitor, Throughput and Profile that configs/callbacks names, the process that samples a node
(`sampler`), the check of the network that tools/comm.py runs (`network_check`), and readers of what runs write:
`event_files` for curves, `node_usage` for samples of nodes and phases. It needs the rooms run, launch, jobs, training
and resume.
"""
