# Modules of Vista, in env.sh and in jobs. Source in vista.yaml: [1]
module load gcc cuda python3
