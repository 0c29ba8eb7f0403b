"""Do every harm on a ground, and print what it has found: python harmful.py TESTS FOLDER"""

import sys
from pathlib import Path

TESTS, FOLDER = map(Path, sys.argv[1:])
sys.path[0] = str(TESTS)
from trial import ground  # noqa: E402
from trial.program import BASH, Program  # noqa: E402

SCRIPT = """
cd "$1"; echo more >>theirs/changed; rm theirs/removed; touch ours.part outside/new canary
sleep 60 & kill -9 "$2"
exit 3
"""
ground.GONE = 0.5
ground.adopt()
here = ground.Ground(FOLDER, TESTS)
here.stand_by()
here.protect(here.folder / "theirs", ["kept", "changed", "removed", "x.lock"])
(here.folder / "outside").mkdir()
here.watch([here.folder / "outside"], but=here.folder / "outside" / "open")
words = [BASH, "-c", SCRIPT, "bash", str(here.folder), str(here.bystander)]
harmful = Program(TESTS, words, here.folder / "logs" / "harmful.log")
hangs = Program(TESTS, [BASH, "-c", "while :; do sleep 0.1; done"], here.folder / "logs" / "hangs.log", deadline=5)
here.run(harmful, hangs)
here.expect(harmful, 0)
here.close()
print(*sorted(here.counts.elements()), sep="\n")
