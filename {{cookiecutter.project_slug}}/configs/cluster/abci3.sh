# Modules of ABCI 3.0, in env.sh and in jobs. Source in abci3.yaml: [2]
source /etc/profile.d/modules.sh || return
module load python/3.12/3.12.9
