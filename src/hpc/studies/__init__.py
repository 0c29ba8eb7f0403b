"""Many runs from one command: sweeps, searches, scaling studies, and short runs that try a module.

Offers `job_array` and `trial_config` to submit.py, `optuna_study` to train.py, `scaling_study` to tools/scale.py and
`check` to tools/check.py. Needs hpc/submit to queue jobs, and hpc/plan and hpc/training to try a module. Only
`optuna_study` imports optuna.
"""
