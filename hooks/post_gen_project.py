"""Print the next three commands."""

import os
import shlex
import sys
from pathlib import Path

project = Path.cwd()
# Where the person stands: this hook itself runs inside the new project.
here = os.environ.get("PWD", "")
path = os.path.relpath(project, here) if here and project.is_relative_to(here) else str(project)

sys.stdout.reconfigure(errors="backslashreplace")  # a path that the terminal cannot show must not fail the bake
print(f"\nNext:\n  cd {shlex.quote(path)}\n  source env.sh\n  python train.py\n")
