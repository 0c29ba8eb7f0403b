"""Submission: from a checked config to a queued run.

It offers `queue_run.submit_run` for a new run, `resubmit.resubmit` for one that was submitted before, and
`preset_scripts.write_preset_scripts` for the scripts of slurm/. It needs config, run, jobs, and plan to reject what
does not fit.
"""
