# Functions for runs of an array that share a node, which a job of Slurm gets whole; sourced after slurm.bash. Each run is a
# subshell with a step of Slurm, a log and an end of its own. One that ends leaves the others alone: the job goes on as long
# as one of its runs does, and is requeued then if one of them is not finished. The file `ended` of a run directory has the
# job in which the run ended before the others, and whether it goes on with the next start.
#
# A job script sets what enter_array needs, `runs_per_node`, and a function `run_member` that starts the ranks of one run.
# shellcheck shell=bash disable=SC2154,SC2034 # variables that the script sets, and variables that it uses

{

run_members() {
    local first=$((SLURM_ARRAY_TASK_ID * runs_per_node)) number pids='' pid code
    status=0 end_files=()
    unset CUDA_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES HIP_VISIBLE_DEVICES # of the node; Slurm sets those of each step
    export HPC_RUNS_PER_NODE=$runs_per_node
    trap handle_term_of_node TERM
    for ((number = first; number < first + runs_per_node; number++)); do
        choose_run "$number"
        [ -n "$run_dir" ] || break
        echo "job $job: $run_dir is one of its runs, with the log $run_dir/job-$job.log"
        end_files+=("$run_dir/ended")
        start_member $((number - first)) >>"$run_dir/job-$job.log" 2>&1 &
        pids+=" $!"
    done
    for pid in $pids; do
        while wait "$pid"; code=$?; kill -0 "$pid" 2>/dev/null; do :; done
        [ "$code" -le "$status" ] || status=$code
    done
    [ "$(count_waiting_runs)" -gt 0 ] || exit "$status"
    resume_command="sbatch --array=$SLURM_ARRAY_TASK_ID $(printf %q "${members%/*}/job.sh")"
    exit_if_job_ended
    echo "job $job: $(count_waiting_runs) of its runs are not finished, so it is requeued"
    requeue_and_exit
}

start_member() { # NUMBER among the runs of this node
    if [ "${SLURM_RESTART_COUNT:-0}" != 0 ] && [ "$(cat "$run_dir/ended" 2>/dev/null)" = "$job failed" ]; then
        echo "job $job: this run has failed before, so it is not started again; to continue: $resume_command"
        exit 1
    fi
    rm -f "$run_dir/ended"
    MASTER_PORT=$((MASTER_PORT + $1))
    prepare_start
    stay_alive_on_term
    run_member
}

record_end() { # failed or continue: of a run that shares its node, while the job goes on with the others
    [ -z "${HPC_RUNS_PER_NODE:-}" ] || echo "$job $1" >"$run_dir/ended" || true
}

count_waiting_runs() { # which go on when the job is requeued
    cat /dev/null "${end_files[@]}" 2>/dev/null | grep -cxF "$job continue" || true
}

handle_term_of_node() { # a run that is still going requeues the job itself, if it may; for those that wait, this does
    # shellcheck disable=SC2046 # one word per process
    kill -TERM $(jobs -pr) 2>/dev/null || true
    [ "$(count_waiting_runs)" -eq 0 ] || [ "$(query_job_state)" != "cut short" ] || scontrol requeue "$job" || true
}

}
