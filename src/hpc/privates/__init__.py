"""Private attributes of libraries: one file for each library, each access a small function with its reason.

A release of the library may rename them: tests/hpc/privates tries each, and names the version in which one is gone.

Others use
    lightning   the state of Lightning's loops, loggers, strategies and callbacks
    torch       torch's hooks, buffers, storages, DDP, compiler, dispatcher and tensors without content
    torch_sharding  FSDP2's records of sharded parameters, and the parts of DTensors
"""
