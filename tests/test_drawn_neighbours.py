"""Test a few rounds of concurrent use, and check that harm is detected. `make neighbours` runs more rounds."""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
# A harmful neighbour: each of its harms must be reported.
HARMFUL = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import neighbour_ground as ground
ground.GONE, ground.LIMIT = 0.5, 5
ground.adopt()
here = ground.Ground(Path(sys.argv[2]), Path(sys.argv[1]))
here.protect(here.folder / "theirs", ["kept", "changed", "removed", "x.lock"])
script = '''
cd "$1"; echo more >>theirs/changed; rm theirs/removed; touch ours.part
sleep 60 & kill -9 "$2"
exit 3
'''
command = ground.Command("harmful", ["bash", "-c", script, "bash", str(here.folder), str(here.bystander)])
hangs = ground.Command("hangs", ["bash", "-c", "while :; do sleep 0.1; done"])
here.run([command, hangs])
here.expect(command, 0)
here.close()
print(*sorted(here.counts.elements()), sep="\\n")
"""


def run(*words: str | Path, seconds: float) -> str:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout


@pytest.mark.soak
def test_neighbours_do_no_harm_and_without_the_cures_they_do(project):
    said = run(HERE / "drawn_neighbours.py", "--rounds", "3", "--controls", "--project", project, seconds=600)
    assert "3 rounds of seed 1" in said and said.endswith(": 0 harmed\n")
    assert said.count(": found in round") == 3


@pytest.mark.slow
def test_every_harm_is_seen(tmp_path):
    assert run("-c", HARMFUL, HERE, tmp_path / "ground", seconds=60).splitlines() == [
        "changed a file of another",
        "deleted a file of another",
        "does not end",
        "ended a process of another",
        "ended otherwise",
        "left a file",
        "left a process",
    ]
