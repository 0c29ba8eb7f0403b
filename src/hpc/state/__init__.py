"""State that a module, its data and its callbacks keep in attributes: found, compared, saved as plain data, restored.

Others use
    attributes          attributes that have changed since training began, and what restores them
    batch_effects       what making a batch, or moving it to the device, changes
    trainer_settings    values that hooks have set on the Trainer, and that optimizers keep in attributes
    randomness          the random number generators of a process, and numbers that follow from a place
    plain_forms, checksums    plain data for a value, and a fingerprint of it
It needs checkpoint and config.
"""
