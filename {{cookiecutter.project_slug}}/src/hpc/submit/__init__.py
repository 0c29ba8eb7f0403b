"""Submission: from a checked config to a queued run.

`queue_run.submit_run` queues a new run, `resubmit.resubmit` one that was submitted before, `array.create_array_folder`
prepares a job array for `hpc.studies`, and `preset_scripts.write_preset_scripts` writes the scripts of slurm/. Needs
`hpc.config`, `hpc.run`, `hpc.jobs`, and `hpc.plan` to reject what does not fit.
"""
