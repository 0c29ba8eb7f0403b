# Functions of Slurm's job scripts, which source job.bash, this file and shared_node.bash; hpc/jobs/slurm.py renders them. A
# job that has not finished its run is requeued.
#
# A job script sets `set -eo pipefail` (not -u: the module command of some sites fails under it) and these variables:
#   retries                    the job is not requeued after so many starts in a row without a newer checkpoint
#   run_dir, code, work_dir    begin_run: the run directory, its code, and the folder in which relative paths start
#   members, code, work_dir    begin_array_run, enter_array: members is a file with one run directory per line
#   name, code                 begin_new_run: the run directory is named after it and after the job, and has a copy of the code
# shellcheck shell=bash disable=SC2154,SC2034 # variables that the script sets, and variables that it uses

{

# -- The start of a job --

begin_run() { # made by submit.py
    enter_allocation "$@"
    job=$SLURM_JOB_ID
    reject_script_of_another_run "$run_dir"
    cd "$work_dir" || exit
    resume_command="sbatch $(printf %q "$run_dir/job.sh")"
    prepare_start
}

begin_array_run() { # of a sweep or a search: the run of this array task
    enter_array "$@"
    choose_run "$SLURM_ARRAY_TASK_ID"
    prepare_start
}

enter_array() { # a job of a sweep or a search
    enter_allocation "$@"
    job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
    reject_script_of_another_run "${members%/*}"
    cd "$work_dir" || exit
}

choose_run() { # NUMBER in the array; run_dir is empty if there are fewer
    run_dir=$(sed -n "$(($1 + 1))p" "$members")
    code=$run_dir/code
    resume_command="sbatch $(printf %q "$run_dir/job.sh")"
}

begin_new_run() { # of a script that a person submits, such as those in slurm/: it has no run directory yet
    enter_allocation "$@"
    job=$SLURM_JOB_ID
    make_run_directory
    copy_code
    resume_command="srun python train.py resume=$(printf %q "$run_dir")" # inside salloc
    [ "${ENVIRONMENT:-}" != BATCH ] || resume_command="scontrol requeue $job"
    prepare_start
}

enter_allocation() { # ARGUMENTS of the script, of which there must be none
    if [ -z "${SLURM_JOB_ID:-}" ]; then
        echo "job.sh: error: there is no allocation: submit this file with sbatch, or run it inside salloc" >&2
        exit 1
    fi
    reject_arguments "$@"
    forget_ranks_of_the_shell
    export SLURM_EXPORT_ENV=ALL # srun passes on all that is exported below
}

# A copy of a run directory contains a copy of the script, which would continue the original run. Slurm runs its own
# copy of the script, so only Slurm knows which file was submitted.
reject_script_of_another_run() { # FOLDER of this run, or of its array
    local folder=$1 script
    script=$(scontrol show job "$SLURM_JOB_ID" 2>/dev/null | sed -n 's/^ *Command=//p' || true)
    [ "${0##*/}" != job.sh ] || script=$(realpath "$0")
    if [[ $script = */job.sh && -e ${script%/*}/code && ! $script -ef $folder/job.sh ]]; then
        echo "job $job: error: this script belongs to the run in $folder, not to the one in ${script%/*};" \
            "to continue that one: python submit.py resume=$(printf %q "${script%/*}")" >&2
        exit 2
    fi
}

# A job has one run, which it continues when it is requeued. Inside salloc, which Slurm never requeues, each call of a
# script starts a run of its own.
make_run_directory() {
    local number
    mkdir -p runs
    for number in '' -{2..999}; do
        run_dir=$PWD/runs/${name}_$SLURM_JOB_ID$number
        mkdir "$run_dir" 2>/dev/null && break
        [ -d "$run_dir" ] || reject "$run_dir cannot be made: $(mkdir "$run_dir" 2>&1)"
        [ "${ENVIRONMENT:-}" = BATCH ] || continue
        [ "${SLURM_RESTART_COUNT:-0}" != 0 ] ||
            reject "$run_dir exists already, and a job has one run of this name: submit each script by itself, or" \
                "move that directory away if it is of an earlier job with this number"
        break
    done
    export HPC_RUN_DIR=$run_dir # for all ranks
}

prepare_start() { # Slurm may start the same job several times
    earlier='' # the verdict of the previous start; the file stays until the ranks of this start write theirs
    [ "$(read_outcome)" != finished ] || { echo "job $job: the run is finished already" && exit 0; }
    mkdir -p "$run_dir"
    earlier=$(read_verdict)
    count_this_start "${SLURM_RESTART_COUNT#0}"

    # The end of the allocation, in unix seconds. Slurm sets SLURM_JOB_END_TIME since 23.02.
    local end=${SLURM_JOB_END_TIME:-$(SLURM_TIME_FORMAT=%s squeue -h -j "$job" -o %e || true)}
    if [[ $end =~ ^[0-9]+$ ]]; then
        export HPC_JOB_END=$end
    fi
}

# -- The state of the job --

query_job_state() { # of this start: running, cut short, cancelled or requeued
    local now='' restarts=" Restarts=${SLURM_RESTART_COUNT:-0} "
    for _ in {1..30}; do # the controller may be down for a while
        now=$(scontrol show job "$job") && break
        sleep 10
    done
    case $now in
    "" | *JobState=RUNNING*"$restarts"*) echo running ;;
    *Reason=TimeLimit*"$restarts"* | *"$restarts"*PreemptTime=[0-9]*) echo cut short ;;
    *"$restarts"*) echo cancelled ;;
    *) echo requeued ;; # by Slurm itself, or this node was lost and the job continues elsewhere
    esac
}

# -- The ranks, and the end of a job --

# On TERM the ranks save a checkpoint. The script must not end before them, as its end would kill them.
stay_alive_on_term() { trap requeue_if_cut_short TERM; }

# Requeue at once when Slurm cuts the job short (time limit or preemption): soon after TERM it kills the ranks that are
# still running, and this script with them.
requeue_if_cut_short() {
    record_stalled_starts
    [ "$(query_job_state)" = "cut short" ] || return 0
    [ "$stalled" -lt "$retries" ] || { record_end failed && return 0; }
    scontrol requeue "$job" || true
}

exit_unfinished() { # REASON
    echo "job $job: $*; to continue: $resume_command" >&2
    exit $((status ? status : 1))
}

give_up() { # REASON
    record_end failed
    exit_unfinished "$@"
}

exit_if_job_ended() { # or if Slurm starts it again by itself
    case $(query_job_state) in
    cancelled) exit_unfinished "cancelled" ;;
    requeued) echo "job $job: Slurm starts it again" && exit "$status" ;;
    esac
}

requeue_and_exit() {
    scontrol requeue "$job" && exit 0
    exit_unfinished "not requeued"
}

exit_as_ranks_did() { # PID of the launcher
    ranks=$1
    trap 'kill "$ranks"' INT # Ctrl-C inside salloc
    while wait "$ranks"; status=$?; kill -0 "$ranks" 2>/dev/null; do :; done # a signal interrupts wait, not the ranks
    record_stalled_starts

    case $(read_outcome) in # srun changes exit codes, so the ranks write their common verdict into a file
    finished) exit 0 ;;
    failed) give_up "failed (exit code $status); the reason is above and in $run_dir" ;;
    *) [ "$status" -ne 2 ] || give_up "rejected; the reason is above" ;; # another job may be running it
    esac
    exit_if_job_ended
    [ "$stalled" -lt "$retries" ] ||
        give_up "failed: $stalled starts in a row brought no newer checkpoint (exit code $status)"
    if [ -n "${HPC_RUNS_PER_NODE:-}" ]; then
        record_end continue
        echo "job $job: not finished (exit code $status), so it is requeued when the other runs on this node have ended"
        exit 85
    fi
    echo "job $job: not finished (exit code $status), so it is requeued"
    requeue_and_exit
}

run_ranks() { # COMMAND of srun
    stay_alive_on_term
    "$@" &
    exit_as_ranks_did $!
}

}
