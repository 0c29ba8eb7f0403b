"""Logging: the loggers that a config names, the curves of training, and their positions at a checkpoint.

Others use
    loggers             Lightning's loggers, built from the config: one run over all attempts, failures that are told
    positions           how far TensorBoard's files and CSV tables have come, and cutting them back to a checkpoint
    hyperparameters     the config and the result in the loggers
    curves              the callback that every Trainer of this package has: step/loss, step/lr, step/grad_norm
    predicted_samples   the callback that shows validation samples beside their predictions
    logged_names        values that ranks log, reduced by their names
It needs config, launch, run, checkpoint, state, data and strategies. Only numbers, texts and file names cross its door.
"""
