"""Stop a run between two optimizer steps, save it, and resume it exactly.

It offers `trainer.make_trainer`, `test` and `finish` to train.py, and the callback `resume.Resume`, which a Trainer of
this package always has. It needs all rooms below it, down to checkpoint.
"""
