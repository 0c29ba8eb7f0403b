"""Job scripts of Slurm and PBS, and facts about clusters and GPUs.

`job.job_from_config` derives a `Job` from a checked config; `slurm` and `pbs` render it as a script, with lines of
`script_lines` that both have. Scripts source job.bash, and slurm.bash or pbs.bash and pbs_successor.bash. `job_states`
asks the scheduler about jobs, `hardware` lists GPUs. Needs only `hpc.config`; imports neither torch nor lightning.
"""
