# Activate this project's environment, in bash or zsh, for people and jobs alike:   source env.sh
#
# 1. Load the machine's modules: run the lines of `setup` in configs/cluster/$CLUSTER.yaml or, if there is no such file,
#    in src/hpc/jobs/cluster/$CLUSTER.yaml. The default is CLUSTER={{ cookiecutter.cluster }}. Jobs set it to "", as
#    their scripts contain these lines.
# 2. Activate the virtual environment $VENV, by default .venv beside this file. The first time, it is created with
#    ${PYTHON:-python3}, and the versions of constraints.txt are installed. After that nothing is installed and the
#    network is not used, until pyproject.toml or constraints.txt changes.
#    VERSIONS=site, needed once, uses the site's versions instead: the packages of $PYTHON, of a module or a container,
#    and for the rest what pip finds (PIP_FIND_LINKS=, PIP_NO_INDEX=1), within the ranges of pyproject.toml.
#
# The environment holds libraries only. train.py imports the sources beside itself, so several copies of the project,
# such as a git worktree or the copy of a queued job, can share an environment. For a notebook, set PYTHONPATH=src or
# run `pip install -e .` once.

_env_file=''
if [ -n "${BASH_VERSION:-}" ]; then
    [ "${BASH_SOURCE[0]}" = "$0" ] || _env_file=${BASH_SOURCE[0]}
elif [ -n "${ZSH_VERSION:-}" ]; then
    case $ZSH_EVAL_CONTEXT in *:file) eval '_env_file=${(%):-%x}' ;; esac # bash cannot parse this
fi
if [ -z "$_env_file" ]; then
    echo "env.sh: this file must be sourced, in bash or zsh: source env.sh (in another shell, type first: bash)" >&2
    return 1 2>/dev/null || exit 1
fi

_env_print() { printf 'env.sh: %s\n' "$*" >&2; }

# Print the lines of a cluster's `setup`. There may be no Python yet to parse YAML, so awk reads a list of `- line`,
# plain or quoted as a whole. Any other form makes it exit with 3.
_env_setup_lines() {
    awk '
        { sub(/ *\r?$/, "") }
        /^setup:/ { on = 1; if (!/^setup: *(\[\]|null|~)?( *#.*)?$/) exit 3; next }
        /^[^ #-]/ { on = 0 }
        !on || /^ *(#.*)?$/ { next }
        !sub(/^ *- +/, "") { exit 3 }
        /^"[^"\\]*"( +#.*)?$/ || /^\047[^\047]*\047( +#.*)?$/ { split($0, part, substr($0, 1, 1)); print part[2]; next }
        /^[]["\047|>&*!%@`{},#]|^[-?:]( |$)|:( |$)/ { exit 3 }
        { sub(/ +#.*/, ""); print }' "$1"
}

# Run the lines of a cluster's `setup` in this shell.
_env_set_up() {
    local here=$1 cluster=$2 file=configs/cluster/$2.yaml setup line personal
    [ -e "$here/$file" ] || file=src/hpc/jobs/cluster/$cluster.yaml
    if [ ! -r "$here/$file" ]; then
        _env_print "CLUSTER=$cluster has no file in $here/configs/cluster or $here/src/hpc/jobs/cluster"
        return 1
    fi
    if ! setup=$(_env_setup_lines "$here/$file"); then
        _env_print "setup in $file must be a list, with one line of bash after each '  - '"
        return 1
    fi
    while IFS= read -r line <&3; do
        eval "$line" || { _env_print "a setup line of $file failed: $line"; return 1; }
    done 3<<<"$setup"
    personal=${XDG_CONFIG_HOME:-${HOME:-}/.config}/hpc-ml-template/clusters.yaml
    if awk -v key="$cluster:" '/^[^ #]/ { on = index($0, key) == 1 } on && /(^|[ {,])setup:/ { found = 1 }
        END { exit !found }' "$personal" 2>/dev/null; then
        _env_print "note: the setup in $personal runs in jobs only; here the one in $file has run"
    fi
}

_env_main() {
    local here venv files marker marked='' made_as versions python=${PYTHON:-python3}
    [ -z "${ZSH_VERSION:-}" ] || emulate -L ksh # lines of `setup` are written for bash
    here=$(CDPATH= cd -- "$(dirname -- "$_env_file")" >/dev/null && pwd) || return 1
    [ -z "${CLUSTER-{{ cookiecutter.cluster }}}" ] || _env_set_up "$here" "${CLUSTER-{{ cookiecutter.cluster }}}" || return 1
    venv=${VENV:-$here/.venv}
    case $venv in /*) ;; *) venv=$PWD/$venv ;; esac
    files=$(<"$here/pyproject.toml")$'\n'$(<"$here/constraints.txt") || return 1
    # One marker per project, as projects may share an environment. src/hpc/run/installation.py writes it: the path,
    # as environments cannot be moved, VERSIONS, and the two files.
    marker=${files#*$'\n'name = \"} marker=$venv/.complete-${marker%%\"*}
    [ ! -r "$marker" ] || marked=$(<"$marker")
    made_as=${marked%%$'\n'*} versions=${marked#*$'\n'}
    versions=${VERSIONS:-${versions%%$'\n'*}}
    [ "$made_as" -ef "$venv" ] && venv=$made_as # the same folder under another path
    case $made_as in "$venv" | [!/]* | '') ;; *)
        _env_print "$venv was made as $made_as and cannot be moved: remove it, then source again"
        return 1 ;;
    esac
    if [ -n "${SLURM_JOB_ID:-}${PBS_JOBID:-}" ]; then
        # A job installs nothing, and its owner may have changed the environment since the job was queued. So it stops
        # only if its code cannot run.
        if [ ! -x "$venv/bin/python" ]; then
            _env_print "there is no environment in $venv, and jobs do not install: source env.sh on a login node," \
                "then submit again (python submit.py resume=RUN_DIR)"
            return 1
        fi
        PYTHONPATH=$here/src${PYTHONPATH:+:$PYTHONPATH} "$venv/bin/python" -sPm hpc.run.installation --check || return 1
    elif [ "$marked" != "$venv"$'\n'"$versions"$'\n'"$files" ]; then
        "$venv/bin/python" -m pip --version >/dev/null 2>&1 && python=$venv/bin/python # it exists already
        if ! "$python" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' 2>/dev/null; then
            _env_print "Python 3.11 or newer is needed, and '$python' is older or missing: load a module or set PYTHON"
            return 1
        fi
        PYTHONPATH=$here/src${PYTHONPATH:+:$PYTHONPATH} "$python" -sPm hpc.run.installation "$venv" || return 1
    fi
    if [ ! -x "$venv/bin/python" ]; then
        _env_print "the Python of $venv is missing: load its module, or remove $venv and source env.sh again"
        return 1
    fi
    # Otherwise each process orders a set of strings differently: labels that are numbered by list(set(names)) would
    # change when a run is resumed.
    export PYTHONHASHSEED=${PYTHONHASHSEED:-0}
    # If it is active already, PATH stays as it is.
    [ "${VIRTUAL_ENV:-}" = "$venv" ] && [ "$(command -v python)" = "$venv/bin/python" ] || source "$venv/bin/activate"
}

if _env_main; then
    unset -f _env_print _env_setup_lines _env_set_up _env_main && unset _env_file
else
    unset -f _env_print _env_setup_lines _env_set_up _env_main && unset _env_file
    return 1
fi
