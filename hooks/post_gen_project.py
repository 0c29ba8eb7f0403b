"""Note in .cruft.json which commit of the template the project is from, and print the next commands."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ANSWERS = json.loads(r"""{{ cookiecutter | tojson }}""")
# The folder in which cookiecutter was called. The hook itself runs in the new project.
CALLER = os.environ.get("PWD", "")

COMMIT_UNKNOWN = """
`cruft update` cannot update this project: git gives no commit or no address of the template {template}.
To link it to a repository later, type this command in the project, and give the same answers as now:
  cruft link https://github.com/org/hpc-ml-template --checkout v{version}
"""
UNCOMMITTED = """
The template has uncommitted changes. `cruft update` will treat them as your own changes.
"""


def main():
    """Write .cruft.json, unless cruft itself bakes, and print what to do next."""
    if "_commit" in ANSWERS:
        return  # cruft writes the file; it also bakes in temporary folders, to compare them
    sys.stdout.reconfigure(errors="backslashreplace")  # a path that the terminal cannot show must not fail the bake
    note = write_link()
    project = Path.cwd()
    path = os.path.relpath(project, CALLER) if CALLER and project.is_relative_to(CALLER) else str(project)
    print(f"{note}\nNext:\n  cd {shlex.quote(path)}\n  source env.sh\n  python train.py\n")


def write_link():
    """Write .cruft.json as `cruft create` does. Return a note on what `cruft update` cannot know."""
    folder = os.path.abspath(os.path.join(CALLER, ANSWERS["_repo_dir"]))
    is_local = ANSWERS["_template"] == ANSWERS["_repo_dir"]  # a folder was given; otherwise it is a clone
    try:
        ask_git(folder, "rev-parse", "--verify", "HEAD:cookiecutter.json")  # it is a template, and in git
        address = folder if is_local else ask_git(folder, "config", "remote.origin.url")
        commit = ask_git(folder, "rev-parse", "HEAD")
        changes = ask_git(folder, "status", "--porcelain")
    except (OSError, subprocess.CalledProcessError):
        (version,) = re.findall('__version__ = "(.+)"', Path("src/hpc/__init__.py").read_text(encoding="utf-8"))
        return COMMIT_UNKNOWN.format(template=ANSWERS["_template"], version=version)
    link = {
        "template": re.sub("^(https?://)[^/]*@", r"\1", address),  # without user and password
        "commit": commit,
        "checkout": ANSWERS["_checkout"],
        "context": {"cookiecutter": {key: value for key, value in ANSWERS.items() if not key.startswith("_")}},
        "directory": None,
    }
    Path(".cruft.json").write_text(json.dumps(link, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return UNCOMMITTED if changes else ""


def ask_git(folder, *arguments):
    """Return the output of git for this folder, and not for a repository around it."""
    command = ["git", "--git-dir=.git", "--work-tree=.", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
