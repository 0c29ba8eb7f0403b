# Modules of Snellius, in env.sh and in jobs. Source in snellius.yaml: [3]; newer ones come each year
module load 2023 || return
module load Python/3.11.3-GCCcore-12.3.0
