# Modules of Derecho, in env.sh and in jobs. Source in derecho.yaml: [1]
module purge
module load nvhpc cuda cray-mpich conda
