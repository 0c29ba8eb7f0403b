# What each job of PBS does around its ranks, and what each of its nodes does: a user cannot requeue there, nothing ends a
# job when one rank fails, and pbsdsh returns 0 whatever happened. So each node leaves its exit code in a file, the job
# watches these files, and submits the next job as long as starts bring newer checkpoints. Job scripts and node scripts
# source it; hpc/jobs/pbs.py renders them.
#
# A job script (run_job, run_array_job, run_new_job) sets before:
#   nodes, interface    how many, and the network interface that ranks meet on, if one is named
#   walltime            in seconds
#   retries             starts in a row without a newer checkpoint, after which no next job is submitted
#   chain               jobs that were submitted one after the other; if there are several, none submits a next one
#   run_dir, code       of run_job: where the run and its code lie
#   members, code       of run_array_job: a file with one run directory per line
#   name, code          of run_new_job: the run directory is named after it and after the job
#   work_dir            where relative paths count from
#   setup, launch       functions: what the cluster wants before all else; start a node script on each node
# A node script (run_node) sets `code`, and defines these functions:
#   setup               as above
#   environment         from there to an environment in which `python` is the right one
#   ranks               become torchrun, with the words that it is given and those of this job
#
# Functions only. bash reads a sourced file to its end before it runs any of it, so nothing changes below a running job.
# The braces around all are one command: of a file that was cut off, bash runs nothing, be it half a function's name.
# shellcheck shell=bash disable=SC2154,SC2034 # variables that the script sets, and that it uses

{

# -- A job: how it begins --

run_job() { # of a run that submit.py has made
    begin_in_job "$@"
    node=$run_dir/node.sh
    run_nodes
}

run_array_job() { # of a sweep or a search: this part's run
    begin_in_job "$@"
    run_dir=$(sed -n "$((${PBS_ARRAY_INDEX:-0} + 1))p" "$members")
    node=${members%/*}/node.sh
    run_nodes
}

run_new_job() { # of a script that anybody submits: nobody has made the run directory
    begin_in_job "$@"
    run_dir=${run_dir:-$work_dir/runs/${name}_$id}
    [ "${PBS_ENVIRONMENT:-}" != PBS_INTERACTIVE ] || [ ! -e "$run_dir" ] || [ "$0" -ef "$run_dir/job.sh" ] ||
        reject "this job has a run already; to go on with it: bash $(printf %q "$run_dir/job.sh"); for another one: qsub"
    mkdir -p -- "$run_dir"
    # PBS's own copy of the script goes away with the job. This one goes on from wherever somebody submits it.
    [ -e "$run_dir/job.sh" ] ||
        places=$(printf 'work_dir=%q run_dir=%q' "$work_dir" "$run_dir") \
            awk '/^work_dir=/ && !named++ { $0 = ENVIRON["places"] } 1' "$0" >"$run_dir/job.sh" || exit 1
    node=$run_dir/node.sh
    sed '$s/.*/run_node "$@"/' "$run_dir/job.sh" >"$node" || exit 1 # it holds what a node needs, too
    run_nodes
}

reject() { echo "job.sh: error: $*" >&2; exit 2; }

begin_in_job() {
    if [ -z "${PBS_JOBID:-}" ] || [ ! -r "${PBS_NODEFILE:-}" ]; then
        reject "this is no PBS job: start it by qsub, not by bash"
    fi
    [ $# = 0 ] || reject "words after the script are not used: $*; type them to submit.py"
    id=${PBS_JOBID%%[!0-9]*} # of 29[1].server, say
    end=$(($(date +%s) + walltime)) # when PBS ends this job
    to_be_continued=85 # exit code
}

run_nodes() {
    again="to go on: qsub $(printf %q "$run_dir/job.sh")"
    cd -- "$work_dir" && exec >>"$run_dir/job-$id.log" 2>&1 || exit 1 # PBS starts in $HOME
    heed_earlier_verdict
    count_this_start
    require_a_host_per_node
    setup # the launcher may come from a module
    find_address
    start_nodes
    watch_nodes
    end_as_nodes_did
}

verdict() { cat -- "$run_dir/verdict" 2>/dev/null; }

outcome() { # of this start; the verdict of the one before stays until an attempt has begun
    [ "$(verdict)" = "$earlier" ] || verdict | sed -n 's/^outcome //p'
}

heed_earlier_verdict() { # of the job before this one
    earlier=$(verdict) failed=''
    case $(sed -n 's/^outcome //p' <<<"$earlier") in
    finished) echo "job.sh: the run is finished already" && exit 0 ;;
    failed) # what was queued before that ends here; a job that somebody submits afterwards is meant to try again
        failed=$(sed -n 's/^attempt //p' <<<"$earlier")
        [ "$chain" -eq 1 ] && [ -z "${HPC_AFTER:-}" ] || [ "$failed" = "${HPC_FAILED:-none}" ] ||
            reject "the run has failed; to try again: rm '$run_dir/verdict' and submit" ;;
    esac
}

newest_checkpoint() { # names sort as their steps do, and one that is not whole ends in .part
    find "$run_dir/checkpoints/" -maxdepth 1 -type d -name 'step-*[0-9]' 2>/dev/null | sort | tail -n 1
}

note_stalled_starts() { # the starts in a row that brought no newer checkpoint than they found
    [[ $(newest_checkpoint) > $before ]] && stalled=0
    echo "$stalled" >"$run_dir/stalled"
}

count_this_start() { # a job that a person submitted begins anew
    stalled=0 before=$(newest_checkpoint)
    [ -z "${HPC_AFTER:-}" ] || { read -r stalled <"$run_dir/stalled" && echo "job.sh: goes on after job $HPC_AFTER"; }
    [[ $stalled =~ ^[0-9]{1,9}$ ]] || stalled=0 # a damaged file; bash would execute what stands in it
    stalled=$((10#$stalled + 1))
    note_stalled_starts
}

require_a_host_per_node() {
    hosts=$(awk '!seen[$0]++' "$PBS_NODEFILE") # a host may have several lines
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

# -- A job: its nodes, and the next job --

start_nodes() {
    attempt=$(mktemp -d "$run_dir/.attempt-$id-XXXXXX") || exit 1 # of its own: PBS may start the same job again
    trap 'rm -rf -- "$attempt"' EXIT
    next='' lasting='' told='' # the next job, once it is submitted; why it cannot be; this job is told to end
    stopping='' ended=0 worst=0 rejected='' saved=''
    logged=$(wc -c <"$run_dir/job-$id.log")
    launch "$run_dir" "$attempt" "$address" $((10000 + RANDOM % 22768)) "$id" "$end" "$work_dir" &
    launcher=$!
    trap when_told_to_end TERM
}

stop_nodes() { # pbsdsh passes TERM on to all nodes and ends; this script stays, as its end would kill the ranks
    stopping=yes
    kill -TERM "$launcher" 2>/dev/null
}

when_told_to_end() { # at the end of the walltime; before, by qdel, or by PBS, which starts it again itself or gives it up
    # The walltime began a little before this script, and PBS looks at its clock late rather than early.
    [ -n "$told" ] || { [ "$(date +%s)" -lt $((end - 15)) ] && told=early || told=late; }
    stop_nodes
    note_stalled_starts
    # At once: ranks that do not hear are killed in a few seconds, and this script with them.
    submit_next
}

a_node_has_begun() { # NFS shows a folder afresh after a change of one's own
    : >"$attempt/look" && rm -f -- "$attempt/look"
    compgen -G "$attempt/node.*" >/dev/null
}

watch_nodes() { # until all have left their exit codes
    local left=60 file # seconds for the codes, when the launcher has ended or the job is to
    while [ "$ended" -lt "$nodes" ] && [ "$left" -gt 0 ]; do
        sleep 1
        ended=0
        for file in "$attempt"/rc.*; do
            { read -r code <"$file"; } 2>/dev/null || continue
            ended=$((ended + 1))
            case $code in
            "$to_be_continued") saved=yes ;; # and no failure
            2) rejected=yes ;;&
            *) [ "$code" -le "$worst" ] || worst=$code ;;
            esac
        done
        if [ "$worst" -ne 0 ] && [ -z "$stopping" ]; then # the other nodes would wait for the failed one
            echo "job.sh: a node ended with code $worst, so the others are told to end: see errors/ and node-*-$id.log"
            stop_nodes
        fi
        [ "$told" != late ] || [ $((left % 5)) -ne 0 ] || submit_next # if it did not work at once
        [ -z "$stopping$saved" ] && kill -0 "$launcher" 2>/dev/null || left=$((left - 1))
        # If no node begins, the launcher has failed, and there is nobody to wait for.
        [ "$left" -gt 50 ] || [ -n "$stopping$saved" ] || a_node_has_begun || break
    done
    note_stalled_starts
}

is_next_wanted() { # is there still a next job to submit?
    [ "$chain" -eq 1 ] && [ "$stalled" -lt "$retries" ] && [ -z "$next$lasting" ] && [ "$told" != early ]
}

submit_next() {
    is_next_wanted || return 0
    # After this job; for a part of an array, which PBS lets nothing wait for, when its ranks are surely gone.
    local after=(-W "depend=afterany:$PBS_JOBID")
    case $PBS_JOBID in *\[*) after=(-a "$(date -d '+2 minutes' +%Y%m%d%H%M.%S)") ;; esac
    next=$(PATH=$PATH:${PBS_O_PATH:-} qsub -v "HPC_AFTER=$id${failed:+,HPC_FAILED=$failed}" "${after[@]}" \
        "$run_dir/job.sh" 2>"$attempt/qsub" | grep -E '^[0-9]+(\[\])?(\.[^ ]+)?$') || next='' # sites print more
    cat -- "$attempt/qsub"
    if [ -n "$next" ]; then
        echo "$(date +%s) $next" >>"$run_dir/successors" # report.py and submit.py resume= ask for it
        echo "job.sh: goes on as job $next"
    else
        # Not so: "cannot connect to server", or "would exceed queue's per-user limit", say.
        local never='bad uid|unauthorized|not found|no such file|illegal|unknown (queue|resource)'
        lasting=$(grep -iE "$never" "$attempt/qsub")
    fi
}

# -- A job: how it ends --

end_as_nodes_did() {
    local worse='' said
    [ "$worst" -eq 0 ] || worse=", the worst with code $worst"
    echo "job.sh: $ended of $nodes nodes ended$worse; the run's verdict is: $(outcome)"
    code=$((worst ? worst : 1))
    [ -z "$rejected" ] || { echo "job.sh: rejected; what and why is said in node-*-$id.log" && exit 2; }
    case $(outcome) in
    finished) exit 0 ;;
    failed) exit "$code" ;;
    continue) code=$to_be_continued ;;
    esac
    if [ "$ended" -eq 0 ] && [ -z "$told" ] && ! a_node_has_begun; then
        wait "$launcher"
        said="ended with code $? and started nothing: $(tail -c "+$((logged + 1))" "$run_dir/job-$id.log" | grep -m 1 .)"
        echo "job.sh: error: the launcher (cluster.launcher) $said"
        [ -e "$run_dir/attempts.jsonl" ] || { echo "job.sh: it never worked, so that is all; $again" && exit 1; }
    fi
    for _ in {1..20}; do # the server may be away for some minutes
        submit_next
        is_next_wanted || break
        sleep 15
    done
    say_who_goes_on
    exit "$code"
}

say_who_goes_on() {
    if [ "$told" = early ]; then
        echo "job.sh: told to end before its time: by qdel, or by PBS that lost a node and gives the job up (exit code" \
            "271 either way). If it was not you, queue it again; $again"
    elif [ "$chain" -gt 1 ]; then
        echo "job.sh: the next job of the chain goes on; after the last, $again"
    elif [ "$stalled" -ge "$retries" ]; then
        echo "job.sh: $stalled starts in a row brought no newer checkpoint, so this is the last; $again"
    elif [ -z "$next" ]; then
        echo "job.sh: could not submit the next job from here; $again"
    fi
}

# -- A node --

set_rank_environment() { # NAME=VALUE ... of the cluster; cluster.env comes after it and wins
    # Print at once, stacks on a crash; bytecode is made on submitting, not by every rank anew.
    export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 PYTHONDONTWRITEBYTECODE=1
    export PYTHONHASHSEED=${PYTHONHASHSEED:-0} # else list(set(names)) has another order in each process
    # shellcheck disable=SC2163 # they are NAME=VALUE
    export "$@"
}

# Some sites name GPUs by UUID, on the first node only, or those of all nodes in a file: this node's, as numbers.
name_gpus_by_number() {
    local uuids numbers
    uuids=$(echo "${CUDA_VISIBLE_DEVICES:-}" | cat - "${PBS_NODEFILE:-/}.env" 2>/dev/null | grep -oE 'GPU-[0-9a-fA-F-]+')
    [ -n "$uuids" ] || return 0
    numbers=$(nvidia-smi -L | grep -F "$uuids" | sed -n 's/^GPU \([0-9]*\):.*/\1/p' | paste -sd,)
    [ -n "$numbers" ] || { echo "node.sh: this node has none of the GPUs $uuids" && exit 1; }
    export CUDA_VISIBLE_DEVICES=$numbers
}

# torchrun in a session of its own gets TERM once, from here: PBS signals whole sessions, pbsdsh does so again, and a
# torchrun interrupted again while its ranks save leaves them. PBS no longer sees it then, so it dies with this script.
# It would end with 1 whatever its ranks end with: the first that failed tells more.
define_torchrun() { # for python -c
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

end_as_ranks_did() { # PID of torchrun
    local pid=$1 code=143
    [ -n "$told" ] || { wait "$pid"; code=$?; } # ends early when TERM comes
    if kill -0 "$pid" 2>/dev/null; then
        kill -TERM -- "-$pid" 2>/dev/null || kill -TERM "$pid" # before it has a session of its own
        for _ in {1..45}; do
            kill -0 "$pid" 2>/dev/null && sleep 1
        done
        kill -KILL -- "-$pid" 2>/dev/null
        wait "$pid"
        code=$?
    fi
    exit "$code"
}

run_node() { # RUN_DIR FOLDER_OF_EXIT_CODES ADDRESS PORT JOB END WORK_DIR
    run_dir=$1 attempt=$2 address=$3 port=$4 id=$5 end=$6 work_dir=$7
    # pbsdsh gives PBS_NODENUM, but under MPICH it is 0 everywhere.
    rank=${PALS_NODEID:-${PMI_RANK:-${OMPI_COMM_WORLD_RANK:-${PBS_NODENUM:-0}}}}
    # pbsdsh starts a task per line of the nodefile: the first one of a host does the work.
    mkdir -- "$attempt/node.$rank" 2>/dev/null || { [ -d "$attempt/node.$rank" ]; exit; }
    trap 'echo $? >"$attempt/.rc.$rank" && mv -- "$attempt/.rc.$rank" "$attempt/rc.$rank"' EXIT
    trap 'exit 143' TERM
    exec >>"$run_dir/node-$rank-$id.log" 2>&1 || exit 1 # the pipe that PBS gives breaks when the job is told to end
    cd -- "$work_dir" || exit 1
    export USER="${USER:-$(id -un 2>/dev/null || id -u)}"
    [ -n "$(type -t module)" ] || source /etc/profile
    setup
    export HPC_RUN_DIR=$run_dir HPC_JOB_END=$end
    environment
    name_gpus_by_number
    define_torchrun
    told=''
    ranks --node-rank="$rank" --master-addr="$address" --master-port="$port" &
    trap 'told=yes' TERM
    end_as_ranks_did $!
}

}
