#!/usr/bin/env bash
# Draws docs/tensorboard.png, the picture in the README, from the run of `make demo`. Needs Chromium.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
runs=${1:-build/demo/my-research/runs}
profile=$(mktemp -d)
port=$(.venv/bin/python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
.venv/bin/tensorboard --logdir "$runs" --host 127.0.0.1 --port "$port" 2>/dev/null &
server=$!
trap 'kill "$server"; rm -rf "$profile"' EXIT
for _ in $(seq 120); do
    curl --silent --output /dev/null "http://127.0.0.1:$port/" && break
    sleep 0.5
done
chromium --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking \
    --disable-component-update --disable-sync --user-data-dir="$profile" --window-size=1900,640 --disable-3d-apis \
    --virtual-time-budget=60000 --screenshot=docs/tensorboard.png \
    "http://127.0.0.1:$port/?tagFilter=%5Etrain%2Floss%7Cval%2F%28accuracy%7Csamples%29&smoothing=0#timeseries"
