"""A config becomes a job: Slurm and PBS scripts, the command line, a run that moves."""
