"""Training with Lightning: the start of an attempt, strategies, what they do to a network.

It offers `attempt` for train.py; the strategies, callbacks and the profiler that configs name; `parallelize`,
`clip_gradients` and `NetworkModule` for a researcher's module; and to later rooms `meet_ranks`, for programs that start
ranks, weight averaging, and `dry_run` and `fake_tensors`, by which a step is counted without a run. It
needs the rooms above it: launch, run, checkpoint, state, data and logging.
"""
