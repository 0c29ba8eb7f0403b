"""Many runs from one command: sweeps, searches, scaling studies.

Offers `job_array` to submit.py, `optuna_study` to train.py, `search_command` to tools/search.py and `scaling_study` to
tools/scale.py. Needs hpc/submit to queue jobs, and hpc/run and hpc/monitor to read what runs have left. Only
`optuna_study` and `trial_table` import optuna.
"""
