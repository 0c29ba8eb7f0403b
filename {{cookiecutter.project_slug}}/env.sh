# Activate this project's environment, in bash or zsh, for people and jobs alike:   source env.sh
#
# 1. Load the machine's modules: source configs/cluster/$CLUSTER.sh, if there is one, and then this user's own, beside
#    ~/.config/hpc-ml-template/clusters.yaml. The default is CLUSTER={{ cookiecutter.cluster }}; CLUSTER='' loads none.
# 2. Activate the virtual environment $VENV, by default .venv beside this file. The first time, env.py creates it with
#    ${PYTHON:-python3}: the library hpc-ml at the commit in pyproject.toml, and all that it needs, in the versions of
#    constraints.txt. After that nothing is installed and the network is not used, until pyproject.toml or
#    constraints.txt changes, or another project that shares the environment has installed another library.
#    VERSIONS=site (type it the first time only) uses packages that $PYTHON has already, of a module or a container. pip
#    installs the rest, in versions that the library supports. Offline: PIP_FIND_LINKS=FOLDER PIP_NO_INDEX=1.
# The environment holds libraries only, so copies of the project can share it. For a notebook, set PYTHONPATH=src.

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

_env_main() {
    # NAME.sh may set variables such as venv or python, so these begin with _.
    local _here _cluster=${CLUSTER-{{ cookiecutter.cluster }}} _setup venv python
    [ -z "${ZSH_VERSION:-}" ] || emulate -L ksh # NAME.sh is written for bash
    _here=$(CDPATH= cd -- "$(dirname -- "$_env_file")" >/dev/null && pwd) || return 1
    # Without a file, a job goes on: its cluster may be in a folder of hydra.searchpath.
    _setup=$_here/configs/cluster/$_cluster.yaml
    if [ -n "$_cluster" ] && [ ! -e "$_setup" ] && [ -z "${SLURM_JOB_ID:-}${PBS_JOBID:-}" ]; then
        _env_print "CLUSTER=$_cluster has no file in $_here/configs/cluster"
        return 1
    fi
    for _setup in "$_here/configs/cluster" "${XDG_CONFIG_HOME:-${HOME:-}/.config}/hpc-ml-template"; do
        _setup=$_setup/$_cluster.sh
        [ ! -e "$_setup" ] || source "$_setup" || {
            _env_print "$_setup failed: its last command returned $?"
            return 1
        }
    done
    venv=${VENV:-$_here/.venv} python=${PYTHON:-python3}
    case $venv in /*) ;; *) venv=$PWD/$venv ;; esac
    [ ! -x "$venv/bin/python" ] || python=$venv/bin/python
    if ! "$python" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' 2>/dev/null; then
        _env_print "Python 3.11 or newer is needed, and '$python' is older or missing: load a module or set PYTHON"
        return 1
    fi
    "$python" -sP "$_here/env.py" "$venv" || return 1
    # Otherwise each process orders a set of strings differently: labels that are numbered by list(set(names)) would
    # change when a run is resumed.
    export PYTHONHASHSEED=${PYTHONHASHSEED:-0}
    # If it is active already, PATH stays as it is.
    [ "${VIRTUAL_ENV:-/}" -ef "$venv" ] && [ "$(command -v python)" = "$VIRTUAL_ENV/bin/python" ] && return
    source "$venv/bin/activate"
    if ! [ "$VIRTUAL_ENV" -ef "$venv" ]; then
        _env_print "$venv was made as $VIRTUAL_ENV and cannot be moved: remove it, then source again"
        deactivate
        return 1
    fi
}

if _env_main; then
    unset -f _env_print _env_main && unset _env_file
else
    unset -f _env_print _env_main && unset _env_file
    return 1
fi
