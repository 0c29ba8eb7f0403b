# Modules of Supek, in env.sh and in jobs. Source in supek.yaml: [1] [2]
module load cray-pals
