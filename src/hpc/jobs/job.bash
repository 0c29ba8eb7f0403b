# Functions that the job scripts of Slurm and of PBS share. A script sources this file, and slurm.bash or pbs.bash after
# it. Both start or continue a run, count the starts that brought no newer checkpoint, start the ranks with the cluster's
# launcher, wait for the ranks' common verdict, and end as it says or see that the run goes on.
#
# bash reads what it sources to its end before it runs any of it, so editing a file does not affect a running job.
# The braces around everything make one command: if the file was cut off, bash runs nothing of it.
# shellcheck shell=bash disable=SC2154,SC2034 # variables that the script sets, and variables that it uses

{

reject() { echo "job.sh: error: $*" >&2; exit 2; }

reject_arguments() { # of the script, of which there must be none
    [ $# = 0 ] || reject "arguments are not used: $*; type them after submit.py"
}

# -- The state of the run --

read_verdict() { cat "$run_dir/verdict" 2>/dev/null || true; }

read_outcome() { # of this start; until its ranks write a verdict, the file holds that of the start before
    [ "$(read_verdict)" = "$earlier" ] || read_verdict | sed -n 's/^outcome //p'
}

measure_progress() { # the step is in the name; an incomplete checkpoint ends in .part; a prediction writes parts instead
    find "$run_dir/checkpoints/" -maxdepth 1 -type d -name 'step-*[0-9]' -printf '%f\n' 2>/dev/null |
        cut -d- -f1,2 | sort | tail -n 1 || true
    find "$run_dir/predictions/" -maxdepth 1 -name 'part-*' 2>/dev/null | sort | tail -n 1 || true
}

count_this_start() { # yes | '': whether the count goes on; it begins anew when a person submits the job
    stalled=0 before=$(measure_progress)
    [ -z "$1" ] || read -r stalled <"$run_dir/stalled" || true
    [[ $stalled =~ ^[0-9]{1,9}$ ]] || stalled=0 # a damaged file: bash arithmetic would execute its contents
    stalled=$((10#$stalled + 1))
    record_stalled_starts
}

record_stalled_starts() { # starts in a row that brought no newer checkpoint
    [[ $(measure_progress) > $before ]] && stalled=0
    echo "$stalled" >"$run_dir/stalled" || true # even if the disk is full
}

# -- The environment of the ranks --

copy_code() { # of a script that a person submits; its first start makes the copy that later starts use
    [ -e "$run_dir/code" ] || PYTHONPATH=$code/src python -sPm hpc.run.snapshot "$run_dir" || exit 2
    code=$run_dir/code
}

# NAME.sh of the cluster, and this user's own after it, as env.sh does.
source_cluster_files() { # NAME
    local file
    for file in "$code/configs/cluster/$1.sh" "${XDG_CONFIG_HOME:-${HOME:-}/.config}/hpc-ml-template/$1.sh"; do
        # shellcheck source=/dev/null
        [ ! -e "$file" ] || source "$file" || reject "$file failed: its last command returned $?"
    done
}

# Variables of the shell that submitted this must not reach the ranks.
forget_ranks_of_the_shell() {
    unset RANK WORLD_SIZE LOCAL_RANK NODE_RANK GROUP_RANK MASTER_ADDR MASTER_PORT PYTHONPATH HPC_JOB_END HPC_RUNS_PER_NODE
}

set_rank_environment() { # NAME=VALUE ...; the script exports cluster.env after it, which wins
    # Print without buffering, print stacks on a crash; submit.py has compiled the code, so ranks write no bytecode.
    export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 PYTHONDONTWRITEBYTECODE=1
    export PYTHONHASHSEED=${PYTHONHASHSEED:-0} # otherwise list(set(names)) differs between processes
    # The port at which rank 0 listens, a new one for each start. If it is taken, the start fails.
    export MASTER_PORT=${MASTER_PORT:-$((10000 + RANDOM % 20000))}
    # shellcheck disable=SC2163 # the arguments are NAME=VALUE
    export "$@"
}

}
