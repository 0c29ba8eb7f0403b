# Modules of Trillium, in env.sh and in jobs. Source in narval.yaml: [1]; all clusters of the Alliance have these
module load StdEnv/2023 python/3.11.5
