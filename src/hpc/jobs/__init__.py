"""Job scripts of Slurm and PBS, and facts about clusters and GPUs.

`job.job_from_config` derives a `Job` from a checked config; `slurm` and `pbs` render it as scripts, which source
slurm.bash and pbs.bash. `job_states` asks the scheduler about jobs, `hardware` lists GPUs, cluster/ holds one file per
cluster. Needs only `hpc.config`; imports neither torch nor lightning.
"""
