"""Stop a run between two optimizer steps, save it, and resume it exactly.

It offers `trainer.make_trainer`, `test` and `finish` to train.py, and the callback `resume.Resume`, which a Trainer of
this package always has. It needs the rooms above it: checkpoint, state, data, logging, training and predict.
"""
