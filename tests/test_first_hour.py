"""Check what a person meets in the first hour: a terminal without the environment, zsh, `make demo`, the README."""

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO

PROGRAMS = ["train.py", "submit.py", "plan.py", "report.py"]
PROGRAMS += [f"tools/{name}.py" for name in ("board", "check", "cluster", "comm", "export", "pack", "scale")]

# Imported before the check of the interpreter.
READ_BEFORE = ["__init__", "run/__init__", "run/interpreter", "system/__init__", "system/former_names"]


def test_all_programs_are_tried(project):
    assert sorted(PROGRAMS) == sorted(
        str(path.relative_to(project))
        for path in [*project.glob("*.py"), *project.glob("tools/*.py")]
        if path.name != "env.py"
    )


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_without_its_environment_says_what_to_type(program, project):
    """Python -S does not see installed packages."""
    done = subprocess.run([sys.executable, "-S", program], cwd=project, capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{Path(program).name}: this Python does not have the library hpc-ml")
    assert line.endswith("Type, in bash or zsh: source env.sh")


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_with_an_old_python_says_what_to_type(program, project, monkeypatch, capsys):
    read = [REPO / "src" / "hpc" / f"{name}.py" for name in READ_BEFORE]
    for name in (project / program, project / "env.py", *read):
        tree = ast.parse(name.read_text(), feature_version=(3, 6))  # it can read as far as the sentence
        unions = [node for node in ast.walk(tree) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr)]
        assert name not in read or not unions, name
    monkeypatch.setattr(sys, "version_info", (3, 6, 8))
    monkeypatch.setattr(sys, "version", "3.6.8 (default)")
    monkeypatch.setattr(sys, "argv", [program])
    monkeypatch.setattr(sys, "path", [str(project), *sys.path])
    monkeypatch.chdir(project.parent)
    for name in [name for name in sys.modules if name.partition(".")[0] == "hpc"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(project / program), run_name="__main__")
    for name in [name for name in sys.modules if name.partition(".")[0] == "hpc"]:
        del sys.modules[name]
    assert ended.value.code == 2
    words = f"Python 3.11 or newer is needed, and this is 3.6.8 ({sys.executable}). Type, in bash or zsh: source "
    assert capsys.readouterr().err == f"{Path(program).name}: {words}{project.name}/env.sh\n"


def test_make_demo_installs_nothing_that_only_tests_need(tmp_path):
    """A machine with Python alone: `apt-get` writes down what is asked of it."""
    for name in ("bash", "python3", "env"):
        (tmp_path / name).symlink_to(shutil.which(name))
    for name, words in {"apt-get": f'echo "$*" >>"{tmp_path}/asked"', "id": "echo 0", "rm": ":", "chmod": ":"}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{words}\n")
        (tmp_path / name).chmod(0o755)
    make = [shutil.which("make"), "-C", str(REPO), f"PYTHON={sys.executable}"]
    environ = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    plan = subprocess.run([*make, "-n", "demo"], capture_output=True, text=True, check=True).stdout
    assert "train.py" in plan and "slurm-wlm" not in plan
    assert "slurm-wlm" in subprocess.run([*make, "-n", "test"], capture_output=True, text=True, check=True).stdout
    subprocess.run([*make, "python"], env=environ, check=True, capture_output=True)
    assert not (tmp_path / "asked").exists()


def bash_blocks(file: Path) -> list[str]:
    return re.findall(r"```bash\n(.*?)```", file.read_text(), re.DOTALL)


@pytest.mark.parametrize("name", ["README.md", "docs/reference.md", "docs/bring-your-own.md"])
def test_commands_can_be_pasted_into_zsh(name, project):
    """zsh takes brackets for patterns, and by default a comment for words."""
    first, *_ = blocks = bash_blocks((REPO if name.startswith("docs/") else project) / name)
    assert "#" not in first or name == "docs/reference.md"
    commands = re.sub(r"(?m)(^|\s)#.*", "", "\n".join(blocks))
    for command in re.sub(r"'[^']*'|\"[^\"]*\"", "", commands).splitlines():
        assert not re.search(r"[][?(){}~^]|\s=", command), command


def test_other_shells_are_named_where_env_sh_cannot_be_sourced(project):
    for shell in filter(shutil.which, ("dash", "ksh", "busybox")):
        command = [shell, *(["sh"] if shell == "busybox" else []), "-c", ". ./env.sh"]
        done = subprocess.run(command, cwd=project, capture_output=True, text=True, env=dict(os.environ))
        assert done.returncode == 1 and "in another shell, type first: bash" in done.stderr
    assert "type `bash` first" in (project / "README.md").read_text()
