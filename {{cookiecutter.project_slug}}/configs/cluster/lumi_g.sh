# Modules of LUMI-G, in env.sh and in jobs. Source in lumi_g.yaml: [1] for its containers, [2] for Slingshot
module use /appl/local/laifs/modules || return
module load lumi-aif-singularity-bindings || return
export CXI_FORK_SAFE=1 CXI_FORK_SAFE_HP=1 FI_CXI_DISABLE_CQ_HUGETLB=1
export SINGULARITYENV_PREPEND_PATH=/user-software/bin # of the venv that the image gets as a SquashFS file
