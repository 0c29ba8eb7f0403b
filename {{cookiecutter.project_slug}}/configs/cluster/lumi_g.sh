# Modules of LUMI-G, in env.sh and in jobs. Source in lumi_g.yaml: [1] for its containers
module use /appl/local/laifs/modules || return
module load lumi-aif-singularity-bindings
