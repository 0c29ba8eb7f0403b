"""Places of processes among the ranks, their rendezvous before training, and measured links between nodes.

Offers:
placement        rank, world size and job of this process, read from what its launcher left in the environment
node_checks      checks that the launch, the nodes and the config agree, before the process group starts
rendezvous       a key-value store that all ranks reach, an exchange of JSON values through it, their addresses
object_gather    an object of each rank, given to all
collectives, bandwidth, nccl_log
                 timings of collectives, bandwidths from them, and which networks NCCL uses

Needs the rooms config and system. rendezvous, object_gather, node_checks and collectives import torch when it is used.
"""
