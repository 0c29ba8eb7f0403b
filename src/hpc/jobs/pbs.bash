# Functions for PBS's job scripts and node scripts, which source this file; hpc/jobs/pbs.py renders them. In PBS a user
# cannot requeue a job, a failed rank does not end it, and pbsdsh always returns 0. So each node writes its exit code
# into a file, and the job watches these files. It submits the next job as long as starts bring newer checkpoints.
#
# A job script calls run_job, run_array_job or run_new_job, and sets before that:
#   nodes, interface    number of nodes; network interface for the rendezvous, if the cluster names one
#   walltime            in seconds
#   retries             no next job is submitted after so many starts in a row without a newer checkpoint
#   chain               number of jobs that submit.py has queued one after the other; above 1, none submits a next one
#   run_dir, code       of run_job: the run directory and its code
#   members, code       of run_array_job: members is a file with one run directory per line
#   name, code          of run_new_job: the run directory is named after it and after the job
#   work_dir            the folder in which relative paths start
#   setup, launch       functions: source the cluster's NAME.sh; start a node script on each node
# A node script calls run_node, sets `code`, and defines these functions:
#   environment         activate the environment and export the ranks' variables
#   ranks               exec torchrun, with the given arguments and those of this job
#
# bash reads a sourced file to its end before it runs any of it, so editing this file does not affect a running job.
# The braces around everything make one command: if the file was cut off, bash runs nothing of it.
# shellcheck shell=bash disable=SC2154,SC2034 # variables that the script sets, and variables that it uses

{

# -- The start of a job --

run_job() { # made by submit.py
    enter_job "$@"
    node=$run_dir/node.sh
    run_nodes
}

run_array_job() { # of a sweep or a search: the run of this part of the array
    enter_job "$@"
    run_dir=$(sed -n "$((${PBS_ARRAY_INDEX:-0} + 1))p" "$members")
    node=${members%/*}/node.sh
    run_nodes
}

run_new_job() { # of a script that a person submits: it makes its run directory
    enter_job "$@"
    run_dir=${run_dir:-$work_dir/runs/${name}_$id}
    [ "${PBS_ENVIRONMENT:-}" != PBS_INTERACTIVE ] || [ ! -e "$run_dir" ] || [ "$0" -ef "$run_dir/job.sh" ] ||
        reject "this job has a run already; to continue it: bash $(printf %q "$run_dir/job.sh"); for a new one: qsub"
    mkdir -p -- "$run_dir"
    [ -e "$run_dir/code" ] || PYTHONPATH=$code/src python -sPm hpc.run.snapshot "$run_dir" || exit 2
    code=$run_dir/code
    # PBS deletes its own copy of the script after the job. This copy can be submitted again, from any folder.
    [ -e "$run_dir/job.sh" ] ||
        places=$(printf 'work_dir=%q run_dir=%q' "$work_dir" "$run_dir") \
            awk '/^work_dir=/ && !named++ { $0 = ENVIRON["places"] } 1' "$0" >"$run_dir/job.sh" || exit 1
    node=$run_dir/node.sh
    sed '$s/.*/run_node "$@"/' "$run_dir/job.sh" >"$node" || exit 1 # the script defines the functions of a node, too
    run_nodes
}

reject() { echo "job.sh: error: $*" >&2; exit 2; }

enter_job() { # ARGUMENTS of the script, of which there must be none
    if [ -z "${PBS_JOBID:-}" ] || [ ! -r "${PBS_NODEFILE:-}" ]; then
        reject "there is no PBS job: submit this script with qsub instead of running it"
    fi
    [ $# = 0 ] || reject "arguments are not used: $*; type them after submit.py"
    id=${PBS_JOBID%%[!0-9]*} # 29 of 29[1].server
    end=$(($(date +%s) + walltime)) # when PBS ends this job
    to_be_continued=85 # exit code
}

run_nodes() {
    resume_hint="to continue: qsub $(printf %q "$run_dir/job.sh")"
    cd -- "$work_dir" && exec >>"$run_dir/job-$id.log" 2>&1 || exit 1 # PBS starts in $HOME
    check_earlier_verdict
    count_this_start
    require_one_host_per_node
    setup # the launcher may come from a module
    find_address
    start_nodes
    watch_nodes
    exit_as_nodes_did
}

read_verdict() { cat -- "$run_dir/verdict" 2>/dev/null; }

read_outcome() { # of this start; the file keeps the previous verdict until the ranks write theirs
    [ "$(read_verdict)" = "$earlier" ] || read_verdict | sed -n 's/^outcome //p'
}

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

measure_progress() { # names sort by step; an incomplete checkpoint ends in .part; a prediction writes parts instead
    find "$run_dir/checkpoints/" -maxdepth 1 -type d -name 'step-*[0-9]' 2>/dev/null | sort | tail -n 1
    find "$run_dir/predictions/" -maxdepth 1 -name 'part-*' 2>/dev/null | sort | tail -n 1
}

record_stalled_starts() { # starts in a row that brought no newer checkpoint
    [[ $(measure_progress) > $before ]] && stalled=0
    echo "$stalled" >"$run_dir/stalled"
}

query_job() { PATH=$PATH:${PBS_O_PATH:-} timeout 20 qstat -f "$PBS_JOBID" 2>&1; }

count_this_start() { # the count starts at 0 when a person submits the job
    stalled=0 before=$(measure_progress)
    run_count=$(query_job | sed -n 's/^ *run_count = \([0-9]*\)$/\1/p') # 2 if PBS has started this job again
    [ -z "${HPC_AFTER:-}" ] || echo "job.sh: continues after job $HPC_AFTER"
    if [ -n "${HPC_AFTER:-}" ] || [ "${run_count:-1}" -gt 1 ]; then read -r stalled <"$run_dir/stalled"; fi
    [[ $stalled =~ ^[0-9]{1,9}$ ]] || stalled=0 # a damaged file: bash arithmetic would execute its contents
    stalled=$((10#$stalled + 1))
    record_stalled_starts
}

require_one_host_per_node() {
    hosts=$(awk '!seen[$0]++' "$PBS_NODEFILE") # a host may be listed several times
    [ "$(wc -l <<<"$hosts")" -eq "$nodes" ] ||
        reject "asked for $nodes nodes, PBS gave $(paste -sd' ' <<<"$hosts"): each chunk needs a node of its own," \
            "so submit with select=$nodes and place=scatter, as the #PBS lines of this script say"
}

find_address() {
    address=$(head -n 1 <<<"$hosts") # this host
    [ -n "$interface" ] || return 0
    address=$(PATH=$PATH:/usr/sbin:/sbin ip -4 -o addr show dev "$interface" | awk '{ print $4; exit }')
    address=${address%/*}
    [ -n "$address" ] || reject "$HOSTNAME has no IPv4 address on interface $interface (ip addr): set cluster.interface"
}

draw_port() { # at which nothing listens on this host
    for _ in {1..20}; do
        port=$((10000 + RANDOM % 22768))
        (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null || break
    done
}

# -- The nodes of a job, and the next job --

start_nodes() {
    attempt=$(mktemp -d "$run_dir/.attempt-$id-XXXXXX") || exit 1 # a new one per start: PBS may start a job again
    trap 'rm -rf -- "$attempt"' EXIT
    # The next job once it is submitted; the error if it never can be; early or late once this job got TERM.
    next='' permanent_error='' term='' outlived=''
    is_stopping='' ended=0 worst=0 rejected='' saved=''
    logged=$(wc -c <"$run_dir/job-$id.log")
    draw_port
    launch "$run_dir" "$attempt" "$address" "$port" "$id" "$end" "$work_dir" &
    launcher=$!
    trap handle_term TERM
}

terminate_nodes() { # pbsdsh passes TERM on and ends; this script must not end yet, as that would kill the ranks
    is_stopping=yes
    kill -TERM "$launcher" 2>/dev/null
}

handle_term() { # TERM comes at the end of the walltime; earlier it comes from qdel, or from PBS that lost a node
    # 15 seconds of tolerance: the walltime started a little before this script.
    [ -n "$term" ] || { [ "$(date +%s)" -lt $((end - 15)) ] && term=early || term=late; }
    terminate_nodes
    record_stalled_starts
    # At once: in a few seconds PBS kills the ranks that are still running, and this script with them.
    submit_next
}

has_a_node_started() { # NFS lists a folder anew after this process has changed it
    : >"$attempt/look" && rm -f -- "$attempt/look"
    compgen -G "$attempt/node.*" >/dev/null
}

watch_nodes() { # until all nodes have written their exit codes
    local left=60 file # seconds to wait once the launcher has ended or the job is ending
    while [ "$ended" -lt "$nodes" ] && [ "$left" -gt 0 ]; do
        sleep 1
        ended=0
        for file in "$attempt"/rc.*; do
            { read -r code <"$file"; } 2>/dev/null || continue
            ended=$((ended + 1))
            case $code in
            "$to_be_continued") saved=yes ;; # not a failure
            2) rejected=yes ;;&
            *) [ "$code" -le "$worst" ] || worst=$code ;;
            esac
        done
        if [ "$worst" -ne 0 ] && [ -z "$is_stopping" ]; then # the other nodes would wait for the failed one
            echo "job.sh: a node ended with code $worst, so the others are terminated: see errors/ and node-*-$id.log"
            terminate_nodes
        fi
        [ "$term" != late ] || [ $((left % 5)) -ne 0 ] || submit_next # again, if it failed before
        [ -z "$is_stopping$saved" ] && kill -0 "$launcher" 2>/dev/null || left=$((left - 1))
        # If no node starts, the launcher has failed.
        [ "$left" -gt 50 ] || [ -n "$is_stopping$saved" ] || has_a_node_started || break
    done
    record_stalled_starts
}

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
    local after=(-W "depend=afterany:$PBS_JOBID")
    case $PBS_JOBID in *\[*) after=(-a "$(date -d '+2 minutes' +%Y%m%d%H%M.%S)") ;; esac
    next=$(PATH=$PATH:${PBS_O_PATH:-} qsub -v "HPC_AFTER=$id${failed:+,HPC_FAILED=$failed}" "${after[@]}" \
        "$run_dir/job.sh" 2>"$attempt/qsub" | grep -E '^[0-9]+(\[\])?(\.[^ ]+)?$') || next='' # sites print more
    cat -- "$attempt/qsub"
    if [ -n "$next" ]; then
        echo "$(date +%s) $next" >>"$run_dir/successors" # report.py and submit.py resume= read it
        echo "job.sh: continues as job $next"
    else
        # Other errors pass: "cannot connect to server", or "would exceed queue's per-user limit".
        local never='bad uid|unauthorized|command not found|script file.*no such|illegal|unknown (queue|resource)'
        permanent_error=$(grep -iE "$never" "$attempt/qsub")
    fi
}

# -- The end of a job --

exit_as_nodes_did() {
    local worse='' what
    [ "$worst" -eq 0 ] || worse=", the worst with code $worst"
    echo "job.sh: $ended of $nodes nodes ended$worse; the run's verdict is: $(read_outcome)"
    code=$((worst ? worst : 1))
    [ -z "$rejected" ] || { echo "job.sh: rejected; the reason is in node-*-$id.log" && exit 2; }
    case $(read_outcome) in
    finished)
        [ "$chain" -eq 1 ] || echo "job.sh: PBS deletes the jobs of the chain that are left, as the run is finished"
        exit 0 ;;
    failed) exit "$code" ;;
    continue) code=$to_be_continued ;;
    esac
    if [ "$ended" -eq 0 ] && [ -z "$term" ] && ! has_a_node_started; then
        wait "$launcher"
        what="ended with code $? and started nothing:"
        what+=" $(tail -c "+$((logged + 1))" "$run_dir/job-$id.log" | grep -m 1 .)"
        echo "job.sh: error: the launcher (cluster.launcher) $what"
        [ -e "$run_dir/attempts.jsonl" ] || { echo "job.sh: no start has worked, so no next job; $resume_hint" && exit 1; }
    fi
    for _ in {1..20}; do # the server may be down for some minutes
        submit_next
        is_next_wanted || break
        sleep 15
    done
    print_how_to_continue
    exit "$code"
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

# -- A node, and its ranks --

# NAME.sh of the cluster, and this user's own after it, as env.sh does.
source_cluster_files() { # NAME
    local file
    for file in "$code/configs/cluster/$1.sh" "${XDG_CONFIG_HOME:-${HOME:-}/.config}/hpc-ml-template/$1.sh"; do
        # shellcheck source=/dev/null
        [ ! -e "$file" ] || source "$file" || reject "$file failed: its last command returned $?"
    done
}

set_rank_environment() { # NAME=VALUE ...; the script exports cluster.env after it, which wins
    # Print without buffering, print stacks on a crash; submit.py has compiled the code, so ranks write no bytecode.
    export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 PYTHONDONTWRITEBYTECODE=1
    export PYTHONHASHSEED=${PYTHONHASHSEED:-0} # otherwise list(set(names)) differs between processes
    # shellcheck disable=SC2163 # the arguments are NAME=VALUE
    export "$@"
}

# Some sites name GPUs by UUID, in a variable of the first node only or in a file for all nodes. Use their numbers.
number_gpus() {
    local uuids numbers
    uuids=$(echo "${CUDA_VISIBLE_DEVICES:-}" | cat - "${PBS_NODEFILE:-/}.env" 2>/dev/null |
        grep -oE 'GPU-[0-9a-fA-F-]+')
    [ -n "$uuids" ] || return 0
    numbers=$(nvidia-smi -L | grep -F "$uuids" | sed -n 's/^GPU \([0-9]*\):.*/\1/p' | paste -sd,)
    [ -n "$numbers" ] || { echo "node.sh: this node has none of the GPUs $uuids" && exit 1; }
    export CUDA_VISIBLE_DEVICES=$numbers
}

# torchrun must get TERM only once: a second one makes it leave its ranks while they save. PBS and pbsdsh both signal
# whole sessions, so torchrun gets a session of its own, and this script passes TERM on. PBS does not clean up other
# sessions, so prctl kills torchrun when this script dies. torchrun itself always fails with exit code 1; this code ends
# with that of the first rank that failed.
define_torchrun_code() { # for python -c
    torchrun='import ctypes, runpy, sys
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
ctypes.CDLL(None).prctl(1, 9)
try:
    runpy.run_module("torch.distributed.run", run_name="__main__")
except ChildFailedError as failed:
    print(failed, file=sys.stderr)
    code = failed.get_first_failure()[1].exitcode
    sys.exit(code if code >= 0 else 128 - code)'
}

exit_as_ranks_did() { # PID of torchrun
    local pid=$1 code=143
    [ -n "$term" ] || { wait "$pid"; code=$?; } # TERM interrupts wait
    if kill -0 "$pid" 2>/dev/null; then
        kill -TERM -- "-$pid" 2>/dev/null || kill -TERM "$pid" # setsid has not run yet
        for _ in {1..45}; do
            kill -0 "$pid" 2>/dev/null && sleep 1
        done
        kill -KILL -- "-$pid" 2>/dev/null
        wait "$pid"
        code=$?
    fi
    exit "$code"
}

run_node() { # RUN_DIR EXIT_CODE_FOLDER ADDRESS PORT JOB END WORK_DIR
    run_dir=$1 attempt=$2 address=$3 port=$4 id=$5 end=$6 work_dir=$7
    # pbsdsh sets PBS_NODENUM; under MPICH it is 0 on every node.
    rank=${PALS_NODEID:-${PMI_RANK:-${OMPI_COMM_WORLD_RANK:-${PBS_NODENUM:-0}}}}
    # pbsdsh starts a task per line of the nodefile: only the first one of a host starts ranks.
    mkdir -- "$attempt/node.$rank" 2>/dev/null || { [ -d "$attempt/node.$rank" ]; exit; }
    trap 'echo $? >"$attempt/.rc.$rank" && mv -- "$attempt/.rc.$rank" "$attempt/rc.$rank"' EXIT
    trap 'exit 143' TERM
    exec >>"$run_dir/node-$rank-$id.log" 2>&1 || exit 1 # PBS's own pipe breaks on TERM
    cd -- "$work_dir" || exit 1
    export USER="${USER:-$(id -un 2>/dev/null || id -u)}"
    [ -n "$(type -t module)" ] || source /etc/profile
    export HPC_RUN_DIR=$run_dir HPC_JOB_END=$end
    environment
    number_gpus
    define_torchrun_code
    term=''
    ranks --node-rank="$rank" --master-addr="$address" --master-port="$port" &
    trap 'term=yes' TERM
    exit_as_ranks_did $!
}

}
