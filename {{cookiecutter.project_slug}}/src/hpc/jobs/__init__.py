"""A config becomes a job script for Slurm or PBS; facts of clusters and GPUs."""
