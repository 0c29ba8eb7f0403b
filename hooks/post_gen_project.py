"""Print the next three commands."""

import os
import shlex
import sys
from pathlib import Path

project = Path.cwd()
# The folder in which cookiecutter was called. The hook itself runs in the new project.
caller = os.environ.get("PWD", "")
path = os.path.relpath(project, caller) if caller and project.is_relative_to(caller) else str(project)

sys.stdout.reconfigure(errors="backslashreplace")  # a path that the terminal cannot show must not fail the bake
print(f"\nNext:\n  cd {shlex.quote(path)}\n  source env.sh\n  python train.py\n")
