"""Strategies: how ranks share a network and its training step, and what that changes in the network.

Others use
    single, ddp, fsdp, deepspeed    the strategies that configs name; each is one of Lightning's
    parallelize         the section `strategy` of a config, applied to a module by its blocks
    blocks              the repeated blocks of a module
    gradients           clipping in every layout and grouping of parameters, for a researcher's module; the last norm
    lockstep            what all ranks must do together, with the name of the rank that does something else
    synced_buffers      rank 0's buffers, which all ranks have
    sharded_tensors     an explanation of torch's errors about shards
    compile_cache       the callback that keeps what torch.compile has made
It needs config, run, checkpoint, state, data and packed. A LightningModule and its Trainer cross its door.
"""
