"""Whether this Python can run the project. Programs call this before all other imports, so any Python 3 can read it."""

import os
import shlex
import sys
from importlib.util import find_spec

OLDEST = (3, 11)  # as pyproject.toml
PACKAGES = ("omegaconf", "hydra", "torch", "lightning")  # without which no program begins


def require_environment():  # type: ignore[no-untyped-def]
    """End the program, with the line to type, if this Python is too old or has not the packages of the project."""
    missing = [name for name in PACKAGES if not find_spec(name)]
    if sys.version_info < OLDEST:
        reason = "Python {}.{} or newer is needed, and this is {}".format(*OLDEST, sys.version.split()[0])
    elif missing:
        reason = "this Python does not have {}".format(", ".join(missing))
    else:
        return
    folder = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    file = os.path.relpath(os.path.join(folder, "env.sh"))
    sentence = "{}: {} ({}). Type, in bash or zsh: source {}\n"
    sys.stderr.write(sentence.format(os.path.basename(sys.argv[0]), reason, sys.executable, shlex.quote(file)))
    sys.exit(2)
