# Modules of Jean Zay, in env.sh and in jobs. Source in jean_zay.yaml: [2]; arch/h100 before any other
module purge
module load arch/h100
