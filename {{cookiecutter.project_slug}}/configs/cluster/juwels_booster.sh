# Modules of JUWELS Booster, in env.sh and in jobs. Source in juwels_booster.yaml: [4]
module --force purge
module load Stages/2025 GCC Python
