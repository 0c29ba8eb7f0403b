# Modules of Narval, in env.sh and in jobs. Source in narval.yaml: [1]
module load StdEnv/2023 python/3.11.5
