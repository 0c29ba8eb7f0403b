# Modules of Snellius, in env.sh and in jobs. Source in snellius.yaml: [4]; newer ones come each year
module load 2025 || return
module load Python/3.13.1-GCCcore-14.2.0
