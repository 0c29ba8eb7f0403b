"""Private attributes of libraries: one file for each library, each access a small function with its reason.

A release of the library may rename them: tests/hpc/privates tries each, and names the version in which one is gone.

Others use
    lightning   the state of Lightning's loops, loggers, strategies and callbacks
    torch       torch's hooks, buffers, storages, DDP, compiler, dispatcher and tensors without content

FSDP2's and DTensor's are in strategies/sharded_parameters.py, gathering.py and sharded_tensors.py, which do nothing
else.
"""
