# Modules of JUWELS Booster, in env.sh and in jobs. Source in juwels_booster.yaml: [4]
module --force purge
module load Stages/2025 GCC Python || return
unset PYTHONPATH  # Python's module sets it to packages of its own, which would hide those of the environment
