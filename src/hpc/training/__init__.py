"""Training: an attempt at a run on each of its ranks, from a composed config to a verdict.

Others use
    attempt             the start of an attempt, for train.py, by `meet_ranks`, `starting_point`, `lightning_errors`
    record              the loggers of an attempt, and its record: config, code, versions, how far the logs have come
    module              an optional LightningModule around one network
    weight_averaging    Lightning's callbacks that average weights, resumed exactly
    step_overhead, progress     the profiler and the progress bar that configs name
    dry_run, fake_tensors       a training step without a run, counted on tensors without content
It needs config, launch, run, checkpoint, state, strategies and logging. It gives callbacks, and an `Attempt`.
"""
