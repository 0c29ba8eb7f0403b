# Modules of Vega, in env.sh and in jobs. Source in vega.yaml: [3]
module --force purge
module load Python/3.12.3-GCCcore-13.3.0
