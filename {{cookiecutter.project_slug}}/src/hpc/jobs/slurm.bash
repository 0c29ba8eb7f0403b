# What each job of Slurm does around its ranks: it begins or goes on with a run, counts the starts that led nowhere, and
# ends as the ranks' verdict says or is started again. Job scripts source it; hpc/jobs/slurm.py renders them.
#
# The script has said `set -eo pipefail` (not -u: the module command of some sites trips over it), and it sets before:
#   retries                    starts in a row without a newer checkpoint, after which the job does not start again
#   run_dir, code, work_dir    begin_run: where the run and its code lie, and where relative paths count from
#   members, code, work_dir    begin_array_run: a file with one run directory per line
#   name                       begin_new_run: the run directory is named after it and after the job
#
# Functions only. bash reads a sourced file to its end before it runs any of it, so nothing changes below a running job.
# The braces around all are one command: of a file that was cut off, bash runs nothing, be it half a function's name.
# shellcheck shell=bash disable=SC2154,SC2034 # variables that the script sets, and that it uses

{

# -- How a job begins --

begin_run() { # of submit.py
    begin_in_allocation "$@"
    job=$SLURM_JOB_ID
    reject_script_of_another_run "$run_dir"
    cd "$work_dir" || exit
    to_go_on="sbatch $(printf %q "$run_dir/job.sh")"
    begin_start
}

begin_array_run() { # of a sweep or a search: this element's
    begin_in_allocation "$@"
    job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
    reject_script_of_another_run "${members%/*}"
    cd "$work_dir" || exit
    run_dir=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" "$members")
    code=$run_dir/code
    to_go_on="sbatch $(printf %q "$run_dir/job.sh")"
    begin_start
}

begin_new_run() { # of a script that anybody submits, as those of slurm/ are: it has no run directory yet
    begin_in_allocation "$@"
    job=$SLURM_JOB_ID
    make_run_directory
    to_go_on="srun python train.py resume=$(printf %q "$run_dir")" # in an allocation
    [ "${ENVIRONMENT:-}" != BATCH ] || to_go_on="scontrol requeue $job"
    begin_start
}

begin_in_allocation() {
    if [ -z "${SLURM_JOB_ID:-}" ]; then
        echo "job.sh: error: there is no allocation here: sbatch this file, or run it with bash inside salloc" >&2
        exit 1
    fi
    if [ $# != 0 ]; then
        echo "job.sh: error: words after it are not used: $*; type them to submit.py" >&2
        exit 2
    fi
    # Nothing of the shell that submitted this steers the ranks; srun passes on all that is set from here on.
    unset RANK WORLD_SIZE LOCAL_RANK NODE_RANK GROUP_RANK MASTER_ADDR MASTER_PORT PYTHONPATH HPC_JOB_END
    export SLURM_EXPORT_ENV=ALL
}

# A copy of the folder of a run has a copy of the script, which would go on with the original. Slurm runs a copy of its
# own, so Slurm is asked which file was submitted.
reject_script_of_another_run() { # FOLDER of this run, or of its array
    local folder=$1 script
    script=$(scontrol show job "$SLURM_JOB_ID" 2>/dev/null | sed -n 's/^ *Command=//p' || true)
    [ "${0##*/}" != job.sh ] || script=$(realpath "$0")
    if [[ $script = */job.sh && -e ${script%/*}/code && ! $script -ef $folder/job.sh ]]; then
        echo "job $job: error: this script is of the run in $folder, not of the one beside it in ${script%/*};" \
            "that one goes on by: python submit.py resume=$(printf %q "${script%/*}")" >&2
        exit 2
    fi
}

# One for each script that runs in this job, and the same one when Slurm starts the job again.
make_run_directory() {
    local restart=${SLURM_RESTART_COUNT:-0} script number its_restart its_script
    script=$(cksum <"$0" || true)
    mkdir -p runs
    for number in '' -{2..999}; do
        run_dir=$PWD/runs/${name}_$SLURM_JOB_ID$number
        mkdir "$run_dir" 2>/dev/null && break
        { read -r its_restart its_script <"$run_dir/.script"; } 2>/dev/null || continue
        [ "$its_script" != "$script" ] || [ "$its_restart" -ge "$restart" ] || break
    done
    echo "$restart $script" >"$run_dir/.script"
    export HPC_RUN_DIR=$run_dir # in all ranks
}

begin_start() { # of the job; Slurm may start it several times
    earlier='' # verdict of the start before this one, which stays until an attempt of this one has begun
    [ "$(outcome)" != finished ] || { echo "job $job: the run is finished already" && exit 0; }
    mkdir -p "$run_dir"
    earlier=$(verdict)

    stalled=0 before=$(newest_checkpoint) # submitted by hand, a run has all its starts again
    [ "${SLURM_RESTART_COUNT:-0}" -eq 0 ] || read -r stalled <"$run_dir/stalled" || true
    [[ $stalled =~ ^[0-9]{1,9}$ ]] || stalled=0 # a damaged file; bash would execute what stands in it
    stalled=$((10#$stalled + 1))
    note_stalled_starts

    # When Slurm ends the job, in unix seconds. Before 23.02 it does not say so by itself.
    local end=${SLURM_JOB_END_TIME:-$(SLURM_TIME_FORMAT=%s squeue -h -j "$job" -o %e || true)}
    if [[ $end =~ ^[0-9]+$ ]]; then
        export HPC_JOB_END=$end
    fi
}

# -- What is known of the run and of the job --

verdict() { cat "$run_dir/verdict" 2>/dev/null || true; }

outcome() { # of this start
    [ "$(verdict)" = "$earlier" ] || verdict | sed -n 's/^outcome //p'
}

newest_checkpoint() { # names sort as their steps do, and one that is not whole ends in .part
    find "$run_dir/checkpoints/" -maxdepth 1 -type d -name 'step-*[0-9]' 2>/dev/null | sort | tail -n 1 || true
}

note_stalled_starts() { # the starts in a row that brought no newer checkpoint than they found
    [[ $(newest_checkpoint) > $before ]] && stalled=0
    echo "$stalled" >"$run_dir/stalled" || true # even if the disk is full
}

standing_with_slurm() { # of this start
    local now='' restarts=" Restarts=${SLURM_RESTART_COUNT:-0} "
    for _ in {1..30}; do # the controller may be away for a while
        now=$(scontrol show job "$job") && break
        sleep 10
    done
    case $now in
    "" | *JobState=RUNNING*"$restarts"*) echo running ;;
    *Reason=TimeLimit*"$restarts"* | *"$restarts"*PreemptTime=[0-9]*) echo cut short ;;
    *"$restarts"*) echo cancelled ;;
    *) echo requeued ;; # by Slurm itself, or this was cut off and goes on elsewhere
    esac
}

# -- What the ranks need, and how a job ends --

set_rank_environment() { # NAME=VALUE ... of the cluster; cluster.env comes after it and wins
    # Print at once, stacks on a crash; bytecode is made on submitting, not by every rank anew.
    export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 PYTHONDONTWRITEBYTECODE=1
    export PYTHONHASHSEED=${PYTHONHASHSEED:-0} # else list(set(names)) has another order in each process
    export MASTER_PORT=$((10000 + RANDOM % 20000)) # of this attempt; the address follows from the nodes
    # shellcheck disable=SC2163 # they are NAME=VALUE
    export "$@"
}

# Told to end, the script must live on: its end would kill the ranks, which are told, too, and save.
outlive_ranks() { trap requeue_if_cut_short TERM; }

# When Slurm cuts the job short, it asks at once to start again: ranks that do not hear are killed soon, and the script
# with them.
requeue_if_cut_short() {
    note_stalled_starts
    [ "$(standing_with_slurm)" != "cut short" ] || [ "$stalled" -ge "$retries" ] || scontrol requeue "$job" || true
}

stop() { # REASON
    echo "job $job: $*; to go on: $to_go_on" >&2
    exit $((status ? status : 1))
}

end_as_ranks_did() { # PID of the launcher
    ranks=$1
    trap 'kill "$ranks"' INT # Ctrl-C inside salloc
    while wait "$ranks"; status=$?; kill -0 "$ranks" 2>/dev/null; do :; done # a signal ends the waiting, not the ranks
    note_stalled_starts

    case $(outcome) in # exit codes do not come through unchanged, so the ranks leave their common verdict in a file
    finished) exit 0 ;;
    failed) stop "failed (exit code $status); what was asked and why: above and in $run_dir" ;;
    *) [ "$status" -ne 2 ] || stop "rejected; what and why is said above" ;; # another job of this run may go on
    esac
    case $(standing_with_slurm) in
    cancelled) stop "cancelled" ;;
    requeued) echo "job $job: Slurm starts it again" && exit "$status" ;;
    esac
    [ "$stalled" -lt "$retries" ] ||
        stop "failed: $stalled starts in a row brought no newer checkpoint (exit code $status)"
    echo "job $job: not finished (exit code $status), so it is requeued"
    scontrol requeue "$job" && exit 0
    stop "not requeued"
}

run_ranks() { # COMMAND of srun
    outlive_ranks
    "$@" &
    end_as_ranks_did $!
}

}
