# Modules of JUPITER Booster, in env.sh and in jobs. Source in jupiter.yaml: [2]
module --force purge
module load Stages/2026 GCC Python || return
unset PYTHONPATH  # Python's module sets it to packages of its own, which would hide those of the environment
