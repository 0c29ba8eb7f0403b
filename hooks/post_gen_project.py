"""Pin the library to the commit of the template, note that commit in .cruft.json, and print the next commands."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

ANSWERS = json.loads(r"""{{ cookiecutter | tojson }}""")
# The folder in which cookiecutter was called. The hook itself runs in the new project.
CALLER = os.environ.get("PWD", "")
# A folder whose library the project uses, in place of the template's address: for make and the template's own tests.
FOLDER = os.environ.get("HPC_ML_FOLDER", "")

COMMIT_UNKNOWN = """
`cruft update` cannot update this project: git gives no commit or no address of the template {template}.
"""
FOLDER_ONLY = """
This project uses the library hpc-ml from the folder {folder}, as it is there, so it
can be installed only on machines that have this folder. Once the template has an address, type the first line in
the project, with the same answers as now, and write the second into pyproject.toml:
  cruft link ADDRESS --checkout {commit}
  "hpc-ml[deepspeed,search] @ git+ADDRESS@{commit}",
"""
UNCOMMITTED = """
The template has uncommitted changes. `cruft update` will treat them as your own changes.
"""


def main():
    """Write the pin, and .cruft.json unless cruft itself bakes, and print what to do next."""
    if "_commit" in ANSWERS:  # cruft writes the file; it also bakes in temporary folders, to compare them
        write_pin(pin(ANSWERS["_template"], ANSWERS["_commit"]))
        return
    sys.stdout.reconfigure(errors="backslashreplace")  # a path that the terminal cannot show must not fail the bake
    template, commit, changes = find_template()
    write_pin(pin(template, commit))
    if commit:
        write_cruft_json(template, commit)
    note = UNCOMMITTED if changes else "" if commit else COMMIT_UNKNOWN.format(template=ANSWERS["_template"])
    if os.path.isdir(template) and not FOLDER:
        note += FOLDER_ONLY.format(folder=template, commit=commit or "COMMIT")
    project = Path.cwd()
    path = os.path.relpath(project, CALLER) if CALLER and project.is_relative_to(CALLER) else str(project)
    print(f"{note}\nNext:\n  cd {shlex.quote(path)}\n  source env.sh\n  python train.py\n")


def find_template():
    """Return the template's address, or its folder; its commit, None if git does not know; and what has changed in it.

    A clone without changes, whose commit is on a known branch of origin, counts as that address. No network is used.
    """
    folder = os.path.abspath(os.path.join(CALLER, ANSWERS["_repo_dir"]))
    is_local = ANSWERS["_template"] == ANSWERS["_repo_dir"]  # a folder was given; otherwise it is a clone
    try:
        ask_git(folder, "rev-parse", "--verify", "HEAD:cookiecutter.json")  # it is a template, and in git
        commit, changes = ask_git(folder, "rev-parse", "HEAD"), ask_git(folder, "status", "--porcelain")
        if not is_local:
            return without_secrets(ask_git(folder, "config", "remote.origin.url")), commit, changes
    except (OSError, subprocess.CalledProcessError):
        return folder, None, ""
    try:
        origin = ask_git(folder, "config", "remote.origin.url")
        is_published = re.match(r"https?://|ssh://|[\w.-]+@[\w.-]+:", origin) and not changes
        if (
            is_published
            and ask_git(folder, "branch", "--remotes", "--contains", "HEAD", "--list", "origin/*")
            and not FOLDER
        ):
            return without_secrets(origin), commit, ""
    except subprocess.CalledProcessError:  # it has no origin
        pass
    return folder, commit, changes


def without_secrets(address):
    """Return an address without user and password; ssh needs the user."""
    return re.sub(
        r"^((?:git\+)?ssh://[^/@:]*):[^/@]*@", r"\1@", re.sub(r"^((?:git\+)?https?://)[^/]*@", r"\1", address)
    )


def pin(template, commit):
    """Return the address of the library at a commit of the template, as pip and uv take it.

    A folder stands for the library as it is there, at any commit.
    """
    if FOLDER:
        return Path(FOLDER).as_uri()
    address = re.sub(r"^git\+", "", without_secrets(template))
    if scp := re.fullmatch(r"(?:([\w.-]+)@)?([\w.-]+):(?!//)(.+)", address):  # pip takes no git@host:place
        user, host, place = scp.groups()
        is_in_home = user not in (None, "git") and not place.startswith("/")  # of an account, not of a service for git
        address = f"ssh://{user + '@' if user else ''}{host}/{'~/' if is_in_home else ''}{place.lstrip('/')}"
    if "://" not in address:
        folder = os.path.abspath(address)
        if os.path.exists(os.path.join(folder, "cookiecutter.json")):
            return Path(folder).as_uri()
        address = f"file://{quote(folder)}"  # a bare repository
    address = re.sub("^file:///", "file://localhost/", address)  # pip 23 takes no other form
    return f"git+{address}@{commit}"


def write_pin(address):
    file = Path("pyproject.toml")
    text = file.read_text(encoding="utf-8")
    assert text.count(" @ ADDRESS") == 1
    file.write_text(text.replace(" @ ADDRESS", f" @ {address}"), encoding="utf-8")


def write_cruft_json(template, commit):
    """Write .cruft.json as `cruft create` does."""
    link = {
        "template": template,
        "commit": commit,
        "checkout": ANSWERS["_checkout"],
        "context": {"cookiecutter": {key: value for key, value in ANSWERS.items() if not key.startswith("_")}},
        "directory": None,
    }
    Path(".cruft.json").write_text(json.dumps(link, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def ask_git(folder, *arguments):
    """Return the output of git for this folder, and not for a repository around it."""
    command = ["git", "--git-dir=.git", "--work-tree=.", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
