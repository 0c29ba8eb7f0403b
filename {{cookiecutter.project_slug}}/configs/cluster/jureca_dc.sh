# Modules of JURECA-DC, in env.sh and in jobs. Source in jureca_dc.yaml: [3], on JUWELS: the same stages
module --force purge
module load Stages/2025 GCC Python || return
unset PYTHONPATH  # Python's module sets it to packages of its own, which would hide those of the environment
