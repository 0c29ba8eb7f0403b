"""Many runs from one command: sweeps, searches, scaling studies, short runs that try a module, the network's bandwidth.

Offers `job_array` and `trial_config` to submit.py, `optuna_study` to train.py, `scaling_study` to tools/scale.py,
`check` to tools/check.py and `network_check` to tools/comm.py. Needs hpc/submit to queue jobs, hpc/plan and
hpc/training to try a module, hpc/launch to measure links, and hpc/run and hpc/monitor to read what runs have left.
Only `optuna_study` imports optuna.
"""
