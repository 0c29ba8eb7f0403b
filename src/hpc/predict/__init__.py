"""Prediction, `task=predict`: a file per rank and minute, joined in the order of the dataset at the end.

Others use
    prediction_writer   the callback that writes what `predict_step` returns, the checkpoint to load, and what the
                        module and the data must have
It needs config, launch, run, checkpoint, data and training. It gives the run directory predictions.pt: plain data.
"""
