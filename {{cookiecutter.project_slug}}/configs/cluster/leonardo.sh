# Modules of Leonardo Booster, in env.sh and in jobs. Source in leonardo.yaml: [2]
module load python/3.11.7
