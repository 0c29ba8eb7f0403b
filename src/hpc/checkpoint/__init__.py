"""Checkpoints: written whole or not at all, read without executing anything, moved between strategies.

Others use
    strategy_state      the mixin by which each strategy saves and restores a run, and keys of what it saves
    on_disk             a run's checkpoints as folders: list, check, publish, prune, link
    weights, trained    the weights of any checkpoint; a run's trained module, for use from Python
    tokenizer_folder    the tokenizer beside a model of Hugging Face
    plain_data          what a checkpoint can hold, checked before the first step
    writer              writes beside the training
It needs run, config and system.
"""
