#!/bin/bash
# A stub of Python, as in test_env.py. Its pip takes a moment, and detects another pip at the same time.
# It reads STUB, its own path, LOG, where pip writes, and BASE_PYTHON, which is Python.
case "$*" in
  *version_info*) exit 0 ;;
  "-m venv "*) mkdir -p "$3/bin" && echo "home = ${BASE_PYTHON%/*}" >"$3/pyvenv.cfg" && cp "$0" "$3/bin/python" &&
      printf 'VIRTUAL_ENV=%s; PATH=%s/bin:$PATH' "$3" "$3" >"$3/bin/activate" ;;
  "-m pip --version") [ "$0" != "$STUB" ] ;;
  "-Im pip install"*)
    mkdir "$LOG.busy" 2>/dev/null || echo "two at once" >>"$LOG"
    trap 'rmdir "$LOG.busy"' EXIT
    sleep 0.4
    echo installed >>"$LOG" ;;
  *signatures) exit 0 ;;
  *) exec -a "$0" "$BASE_PYTHON" "$@" ;;
esac
