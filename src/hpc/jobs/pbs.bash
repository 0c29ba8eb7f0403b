# Functions of PBS's job scripts, which source job.bash, this file and pbs_successor.bash; hpc/jobs/pbs.py renders
# them. Each rank is the job script again, started by pbs_tmrsh, which every OpenPBS has, or by the site's mpiexec: these
# pass neither the folder nor the environment on, so each rank enters both itself.
#
# A job script sets these variables:
#   nodes, tasks        number of nodes, and of ranks on each
#   interface           network interface for the rendezvous, if the cluster names one
#   walltime            in seconds
#   retries             no next job is submitted after so many starts in a row without a newer checkpoint
#   chain               number of jobs that submit.py has queued one after the other; above 1, none submits a next one
#   work_dir            the folder in which relative paths start
#   run_dir, code       begin_run: the run directory and its code
#   members, code       begin_array_run: members is a file with one run directory per line
#   name, code          begin_new_run: the run directory is named after it and after the job, and has a copy of the code
# It may define a function `launch_ranks`: the site's launcher, which starts a command as each rank.
# shellcheck shell=bash disable=SC2154,SC2034 # variables that the script sets, and variables that it uses

{

# -- The start of a job, or of a rank --

begin_run() { # made by submit.py
    enter_rank "$@" && return
    enter_job "$@"
    script=$run_dir/job.sh
    prepare_start
}

begin_array_run() { # of a sweep or a search: the run of this part of the array
    enter_rank "$@" && return
    enter_job "$@"
    script=${members%/*}/job.sh
    run_dir=$(sed -n "$((${PBS_ARRAY_INDEX:-0} + 1))p" "$members")
    code=$run_dir/code
    prepare_start
}

begin_new_run() { # of a script that a person submits: it has no run directory yet, unless it is that directory's copy
    enter_rank "$@" && return
    enter_job "$@"
    if [ -z "$run_dir" ]; then
        run_dir=$work_dir/runs/${name}_$id
        [ "${PBS_ENVIRONMENT:-}" != PBS_INTERACTIVE ] || [ ! -e "$run_dir" ] ||
            reject "this job has a run already; to continue it: bash $(printf %q "$run_dir/job.sh"); for a new one: qsub"
        mkdir -p -- "$run_dir"
        copy_script
    fi
    script=$run_dir/job.sh
    copy_code
    prepare_start
}

# PBS deletes its own copy of the script after the job. This copy names the run and its environment, and can be submitted
# from any folder.
copy_script() {
    local text before after
    text=$(cat -- "$0")
    before=${text%%$'\n'work_dir=*} after=${text#*$'\n'work_dir=}
    printf '%s\nwork_dir=%q run_dir=%q VENV=%q\n%s\n' "$before" "$work_dir" "$run_dir" "${VENV:-}" \
        "${after#*$'\n'}" >"$run_dir/job.sh" || exit 1
}

enter_job() { # ARGUMENTS of the script
    if [ -z "${PBS_JOBID:-}" ] || [ ! -r "${PBS_NODEFILE:-}" ]; then
        reject "there is no PBS job: submit this script with qsub instead of running it"
    fi
    reject_arguments "$@"
    forget_ranks_of_the_shell
    rank=''
    id=${PBS_JOBID%%[!0-9]*} # 29 of 29[1].server
    end=$(($(date +%s) + walltime)) # when PBS ends this job
    to_be_continued=85 # exit code
}

enter_rank() { # rank RUN_DIR JOB END ADDRESS PORT [RANK LOCAL_RANK]; false in the job itself
    [ "${1:-}" = rank ] || return
    run_dir=$2 code=$2/code id=$3
    export HPC_RUN_DIR=$2 HPC_JOB_END=$4 MASTER_ADDR=$5 MASTER_PORT=$6
    if [ -n "${7:-}" ]; then # otherwise the launcher has variables of its own
        export HPC_RANK=$7 HPC_WORLD_SIZE=$((nodes * tasks)) HPC_LOCAL_RANK=$8 HPC_LOCAL_WORLD_SIZE=$tasks
    fi
    rank=${HPC_RANK:-${PALS_RANKID:-${PMI_RANK:-${OMPI_COMM_WORLD_RANK:-0}}}}
    exec >>"$run_dir/node-$((rank / tasks))-$id.log" 2>&1 || exit 1 # PBS's own pipe breaks on TERM
    : >"$run_dir/.started"
    cd -- "$work_dir" || exit 1 # PBS starts in $HOME
    export USER="${USER:-$(id -un 2>/dev/null || id -u)}"
    local path=$PATH # of the environment, if the script has entered it already
    [ -n "$(type -t module)" ] || source /etc/profile
    PATH=$path:$PATH
}

prepare_start() {
    resume_hint="to continue: qsub $(printf %q "$run_dir/job.sh")"
    cd -- "$work_dir" && exec >>"$run_dir/job-$id.log" 2>&1 || exit 1
    check_earlier_verdict
    run_count=$(query_job | sed -n 's/^ *run_count = \([0-9]*\)$/\1/p') # 2 if PBS has started this job again
    [ -z "${HPC_AFTER:-}" ] || echo "job.sh: continues after job $HPC_AFTER"
    count_this_start "${HPC_AFTER:-}$([ "${run_count:-1}" -le 1 ] || echo yes)"
    require_one_host_per_node
    find_address
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

# -- The ranks --

is_rank() { [ -n "$rank" ]; }

run_ranks() { # COMMAND of a rank
    if is_rank; then
        number_gpus
        exec "$@"
    fi
    start_ranks
    wait_for_ranks
    exit_as_ranks_did
}

# Some sites name GPUs by UUID, in a variable of the first node only or in a file for all nodes. Use their numbers.
number_gpus() {
    local uuids numbers
    uuids=$(echo "${CUDA_VISIBLE_DEVICES:-}" | cat - "${PBS_NODEFILE:-/}.env" 2>/dev/null |
        grep -oE 'GPU-[0-9a-fA-F-]+')
    [ -n "$uuids" ] || return 0
    numbers=$(nvidia-smi -L | grep -F "$uuids" | sed -n 's/^GPU \([0-9]*\):.*/\1/p' | paste -sd,)
    [ -n "$numbers" ] || { echo "job.sh: this node has none of the GPUs $uuids" && exit 1; }
    export CUDA_VISIBLE_DEVICES=$numbers
}

unpack_environment() { # FOLDER: each node reads one large file, by its first rank, instead of many small ones
    is_rank || return 0
    mkdir -p "$1" && exec 9>"$1/.lock" && flock 9 || exit 1
    [ -e "$1/.whole" ] || { tar -xf "$VENV.tar" -C "$1" && : >"$1/.whole"; } || exit 1
    exec 9>&-
    export PATH="$1/bin:$PATH"
}

start_ranks() {
    rm -f -- "$run_dir/.started"
    # The next job once it is submitted; the error if it never can be; early or late once this job got TERM.
    next='' permanent_error='' outlived='' term=''
    logged=$(wc -c <"$run_dir/job-$id.log")
    trap handle_term TERM
    # Open MPI, 4 and 5, would kill the ranks a second after TERM, while they save.
    export OMPI_MCA_odls_base_sigkill_timeout=60 PRTE_MCA_odls_base_sigkill_timeout=60
    local start=(/bin/bash "$script" rank "$run_dir" "$id" "$end" "$address" "$MASTER_PORT") number=0 host local_rank
    launchers=''
    if declare -F launch_ranks >/dev/null; then
        launch_ranks "${start[@]}" &
        launchers=$!
        return
    fi
    for host in $hosts; do
        for ((local_rank = 0; local_rank < tasks; local_rank++, number++)); do
            (export PATH=$PATH:${PBS_O_PATH:-} && exec pbs_tmrsh "$host" "${start[@]}" "$number" "$local_rank") &
            launchers+=" $!"
        done
    done
}

running_launchers() {
    local pid
    for pid in $launchers; do
        ! kill -0 "$pid" 2>/dev/null || echo "$pid"
    done
}

# As srun waits: once a rank has ended, the others have a minute. After TERM the launchers say nothing: pbs_tmrsh ends
# before its rank, or hears no more of it. Then the ranks' verdict is waited for, and rank 0, which ends soon after it.
wait_for_ranks() {
    local left=60 num_running num_launchers
    num_launchers=$(wc -w <<<"$launchers")
    while [ "$left" -gt 0 ]; do
        num_running=$(running_launchers | wc -l)
        [ -n "$term" ] || [ "$num_running" -gt 0 ] || break
        [ "$num_running" -eq "$num_launchers" ] && [ -z "$term" ] || left=$((left - 1))
        [ "$term" != late ] || [ $((left % 5)) -ne 0 ] || submit_next # again, if it failed before
        [ -z "$term" ] || [ "$left" -lt 3 ] || [ -z "$(read_outcome)" ] || left=3
        sleep 1
    done
    record_stalled_starts
}

handle_term() { # TERM comes at the end of the walltime; earlier it comes from qdel, or from PBS that lost a node
    # PBS sends it to the ranks of this host, too, and these agree with the others to save and stop.
    # 15 seconds of tolerance: the walltime started a little before this script.
    [ -n "$term" ] || { [ "$(date +%s)" -lt $((end - 15)) ] && term=early || term=late; }
    record_stalled_starts
    # At once: in a few seconds PBS kills the ranks that are still running, and this script with them.
    submit_next
}

# -- The end of a job --

exit_as_ranks_did() {
    local pid worst=0 worse='' rejected='' code
    for pid in $launchers; do
        ! kill -KILL "$pid" 2>/dev/null || continue # a rank that is left ends with the job
        wait "$pid"
        code=$?
        case $code in
        "$to_be_continued") ;; # not a failure
        2) rejected=yes ;;&
        *) [ "$code" -le "$worst" ] || worst=$code ;;
        esac
    done
    [ "$worst" -eq 0 ] || worse=", the worst with code $worst"
    echo "job.sh: the ranks ended$worse; the run's verdict is: $(read_outcome)"
    code=$((worst ? worst : 1))
    [ -z "$rejected" ] || { echo "job.sh: rejected; the reason is in node-*-$id.log" && exit 2; }
    case $(read_outcome) in
    finished)
        [ "$chain" -eq 1 ] || echo "job.sh: PBS deletes the jobs of the chain that are left, as the run is finished"
        exit 0 ;;
    failed) exit "$code" ;;
    continue) code=$to_be_continued ;;
    esac
    if [ -z "$term" ] && [ ! -e "$run_dir/.started" ]; then
        echo "job.sh: error: the launcher (cluster.launcher) ended with code $worst and started nothing:" \
            "$(tail -c "+$((logged + 1))" "$run_dir/job-$id.log" | grep -m 1 .)"
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

}
