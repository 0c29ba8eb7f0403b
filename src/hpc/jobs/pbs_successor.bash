# The job that continues a run: in PBS a user cannot requeue a job, so a job submits the next one as long as starts bring
# newer checkpoints. The variables are those of pbs.bash, which calls these functions.
# shellcheck shell=bash disable=SC2154,SC2034 # variables that the script sets, and variables that it uses

{

check_earlier_verdict() { # of the previous job
    earlier=$(read_verdict) failed=''
    case $(sed -n 's/^outcome //p' <<<"$earlier") in
    finished) echo "job.sh: the run is finished already" && exit 0 ;;
    failed) # a job that was queued before the failure ends here; one that a person submits later tries again
        failed=$(sed -n 's/^attempt //p' <<<"$earlier")
        [ "$chain" -eq 1 ] && [ -z "${HPC_AFTER:-}" ] || [ "$failed" = "${HPC_FAILED:-none}" ] ||
            reject "the run has failed; to try again: rm '$run_dir/verdict' and submit" ;;
    esac
}

query_job() { PATH=$PATH:${PBS_O_PATH:-} timeout 20 qstat -f "$PBS_JOBID" 2>&1; }

is_next_wanted() { # whether a next job is still to be submitted
    [ "$chain" -eq 1 ] && [ "$stalled" -lt "$retries" ] && [ -z "$next$permanent_error$outlived" ] &&
        [ "$term" != early ]
}

# A script goes on after its job where PBS has lost the host. PBS starts the job again, so it needs no next one.
has_outlived_its_job() {
    local count="run_count = $run_count"
    [ -z "$run_count" ] || count+=$'\n' # the whole number
    case $(query_job; echo .) in
    *"job_state = R"*"$count"*) false ;;
    *"job_state = "* | *"Unknown Job Id"* | *"has finished"*) true ;;
    *) false ;; # the server cannot be asked
    esac
}

submit_next() {
    is_next_wanted || return 0
    if has_outlived_its_job; then
        outlived=yes
        echo "job.sh: PBS has ended job $id or started it again, so this script, which is still here, submits no job"
        return 0
    fi
    # It waits for this job. No job can wait for a part of an array, so there it waits until the ranks are surely gone.
    local after=(-W "depend=afterany:$PBS_JOBID") answer
    case $PBS_JOBID in *\[*) after=(-a "$(date -d '+2 minutes' +%Y%m%d%H%M.%S)") ;; esac
    answer=$(PATH=$PATH:${PBS_O_PATH:-} qsub -v "HPC_AFTER=$id${failed:+,HPC_FAILED=$failed}" "${after[@]}" \
        "$run_dir/job.sh" 2>&1)
    next=$(grep -m 1 -E '^[0-9]+(\[\])?(\.[^ ]+)?$' <<<"$answer") # sites print more
    if [ -n "$next" ]; then
        echo "$(date +%s) $next" >>"$run_dir/successors" # report.py and submit.py resume= read it
        echo "job.sh: continues as job $next"
    else
        echo "$answer"
        # Other errors pass: "cannot connect to server", or "would exceed queue's per-user limit".
        local never='bad uid|unauthorized|command not found|script file.*no such|illegal|unknown (queue|resource)'
        permanent_error=$(grep -iE "$never" <<<"$answer")
    fi
}

print_how_to_continue() {
    if [ "$term" = early ]; then
        echo "job.sh: terminated before its time: by qdel, or by PBS, which lost a node and gives the job up (exit" \
            "code 271 in both cases). If it was not you, submit it again; $resume_hint"
    elif [ "$chain" -gt 1 ]; then
        echo "job.sh: the next job of the chain continues; after the last, $resume_hint"
    elif [ "$stalled" -ge "$retries" ]; then
        echo "job.sh: $stalled starts in a row brought no newer checkpoint, so this is the last job; $resume_hint"
    elif [ -z "$next$outlived" ]; then
        echo "job.sh: could not submit the next job from here; $resume_hint"
    fi
}

}
