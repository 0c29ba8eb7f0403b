#!/usr/bin/env bash
# Draws docs/report.png, the picture in the README, from the newest run in a folder, that of `make demo`. Needs Chromium.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
python=$PWD/.venv/bin/python
picture=$PWD/docs/report.png
profile=$(mktemp -d)
trap 'rm -rf "$profile"' EXIT
cd "${1:-build/demo/my-research}"
runs=(runs/*/)  # their names begin with the time
run=${runs[-1]}
"$python" report.py "$run"
chromium --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking \
    --disable-component-update --disable-sync --hide-scrollbars --user-data-dir="$profile" --window-size=1180,1240 \
    --screenshot="$picture" "file://$PWD/${run}report.html" 2>/dev/null
