#!/bin/bash
# A stub of Python, as in test_env.py. Its pip takes a moment, and detects another pip at the same time.
# It reads STUB, its own path, LOG, where pip writes, BASE_PYTHON, which is Python, PACKAGES, the folder of packages in
# an environment, and LIBRARY, the dist-info folder of an installed hpc-ml.
pip_begins() {
    mkdir "$LOG.busy" 2>/dev/null || echo "two at once" >>"$LOG"
    trap 'rmdir "$LOG.busy"' EXIT
    sleep 0.4
}
case "$*" in
  *version_info*) exit 0 ;;
  "-m venv "*)
    mkdir -p "$3/bin" "$3/$PACKAGES/pip-1.dist-info" && echo "home = ${BASE_PYTHON%/*}" >"$3/pyvenv.cfg" &&
      cp "$0" "$3/bin/python" && touch "$3/$PACKAGES/pip-1.dist-info/RECORD" &&
      printf 'VIRTUAL_ENV=%s; PATH=%s/bin:$PATH' "$3" "$3" >"$3/bin/activate" ;;
  "-Im pip install"*--editable*)
    pip_begins
    packages=${0%/bin/python}/$PACKAGES folder=${!#}
    rm -rf "$packages"/hpc_ml-*
    cp -r "$LIBRARY" "$packages" && ln -sfn "$folder/src/hpc" "$packages/hpc" &&
      printf '{"dir_info": {"editable": true}, "url": "file://%s"}' "$folder" \
        >"$packages/${LIBRARY##*/}/direct_url.json" ;;
  "-Im pip install"*)
    pip_begins
    echo installed >>"$LOG" ;;
  *signatures) exit 0 ;;
  *) exec -a "$0" "$BASE_PYTHON" "$@" ;;
esac
