"""Check the cost of a start, in machine-independent numbers: libraries imported, files of the project read."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
from fork import ENVIRON, PACKAGE, PROJECT

from hpc.config.project import LIBRARY, child_environment

pytestmark = pytest.mark.slow

# Libraries that composing a config imports.
COMPOSING = {"antlr4", "attr", "hydra", "hydra_plugins", "omegaconf", "packaging", "yaml"}
# More libraries that the first step needs, on the rank that writes the curves and samples the node.
WRITING = {"absl", "google", "psutil", "tensorboard"}
# Libraries that import parts of themselves late, and torchdata, which is small: a loader may be one of its own.
MORE_OF = {"fsspec", "lightning", "numpy", "rich", "torch", "torchdata"}
TWO = ["trainer.accelerator=cpu", "trainer.devices=2"]
LIGHT = [
    ["train.py", "--help"],
    ["train.py", "--cfg", "job"],
    ["train.py", "--cfg", "job", "trainer=ddp_4node"],
    ["train.py", "trainer.devices=0"],
    ["train.py", "trainer=fsdp", "--cfg", "job", "--resolve"],
    ["train.py", "trainer=dpp"],
    ["train.py", "strategy=ddp", *TWO, "data.global_batch_size=65"],
    ["train.py", "data=images", "data.dir=/nowhere", "model=resnet18"],
    ["train.py", "data=text", "data.files=/nowhere", "model=gpt_tiny"],
    ["train.py", "+trainer.max_epoch=2"],
    ["train.py", "model.optimizer.lr=fast"],
    ["train.py", "strategy=tensor_parallel", *TWO],
    ["submit.py", "--help"],
    ["submit.py", "--dry-run", "cluster=slurm", "trainer=ddp_4node"],
    ["submit.py", "trainer=dpp"],
]
# Prints the exit code, the libraries that were imported, and each opening of a file or folder of the project or of hpc.
PROBE = """
import json, os, runpy, sys
project, library, *sys.argv = json.loads(sys.argv[1])
sys.path.insert(0, os.path.dirname(sys.argv[0]))
before, opened, code = set(sys.modules), [], 0

def note(event, arguments):
    if event in ("open", "os.listdir", "os.scandir"):
        for folder, name in ((project, ""), (library, "hpc")):
            if str(arguments[0]).startswith(folder):
                opened.append(os.path.join(name, os.path.relpath(str(arguments[0]), folder)))

sys.addaudithook(note)
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    code = end.code
print(json.dumps([code, list(set(sys.modules) - before), opened]))
"""
# Prints the modules after the libraries' import and after the first step, then ends.
FIRST_STEP = """
import gc, json, os, runpy, sys
freeze, found = gc.freeze, {}

def after_imports():
    import lightning
    found["imported"], found["collections"] = list(sys.modules), gc.get_stats()[0]["collections"]
    lightning.Callback.on_train_batch_end = first_step
    freeze()

def first_step(*_):
    print("\\n" + json.dumps(found | {"stepped": list(sys.modules), "collects": gc.isenabled()}), flush=True)
    os._exit(0)

gc.freeze = after_imports
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


# Otherwise Python would read the compiled modules of an earlier run instead of the sources.
FROM_SOURCES = {"PYTHONPYCACHEPREFIX": os.devnull, "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture(scope="session")
def signatures() -> None:
    """Read the signatures of all classes that configs/ name, as env.sh does when it makes the environment."""
    command = [sys.executable, "-sPm", "hpc.config.signatures"]
    subprocess.run(command, cwd=PROJECT, env=child_environment(ENVIRON), check=True, timeout=300)


@pytest.mark.usefixtures("signatures")
@pytest.mark.parametrize("typed", LIGHT, ids=" ".join)
def test_an_answer_needs_no_heavy_library_reads_nothing_twice_and_writes_nothing(
    typed: list[str], tmp_path: Path
) -> None:
    before = {path for path in PROJECT.rglob("*") if "__pycache__" not in str(path)}
    verb, *arguments = typed
    words = [str(PROJECT), str(LIBRARY), str(PROJECT / verb), *arguments]
    done = python(PROBE, json.dumps(words), cwd=tmp_path, **FROM_SOURCES)
    code, imported, opened = json.loads(done.stdout.splitlines()[-1])
    assert code == (0 if arguments[0].startswith("--") else 2), done.stderr
    assert libraries(imported) <= COMPOSING
    read = Counter(name for name in opened if name.endswith((".py", ".yaml", ".json")) and name != verb)
    # Modules, files of configs/, and sources whose digests are compared; checks of data files need more of them.
    # The bounds are the numbers that were measured: raise them only for a module that such an answer needs.
    assert set(read.values()) == {1} and len(read) <= (103 if "/nowhere" in str(typed) else 98)
    # Folders of choices are listed for --help and for an unknown choice only.
    assert ("configs/trainer" in opened) is ("--help" in typed or "trainer=dpp" in typed)
    assert {path for path in PROJECT.rglob("*") if "__pycache__" not in str(path)} == before
    assert list(tmp_path.iterdir()) == []
    assert "Traceback" not in done.stderr and done.stderr.startswith("ConfigError: ") is (code == 2)
    assert ("#SBATCH --nodes=4\n" in done.stdout) is ("--dry-run" in typed)


@pytest.mark.soak
def test_a_first_step_needs_only_what_is_used(tmp_path: Path) -> None:
    bare = set(json.loads(python("import json, sys, torch, lightning; print(json.dumps(list(sys.modules)))").stdout))
    run = [str(PROJECT / "train.py"), f"run_dir={tmp_path / 'run'}", "trainer.max_steps=1"]
    found = json.loads(python(FIRST_STEP, *run).stdout.splitlines()[-1])
    assert libraries(set(found["imported"]) - bare) - MORE_OF <= COMPOSING
    assert libraries(set(found["stepped"]) - bare) - MORE_OF <= COMPOSING | WRITING
    # Garbage collection is off during the imports: it would run some 800 times and take a fifth of the time.
    assert found["collections"] < 200 and found["collects"]


def python(code: str, *arguments: str, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=cwd, env=ENVIRON | environ, capture_output=True, text=True, timeout=120)


def libraries(modules: Iterable[str]) -> set[str]:
    """Return top-level packages, without the standard library, this project, and modules that Cython adds."""
    roots = {name.partition(".")[0] for name in modules}
    found = roots - sys.stdlib_module_names - {PACKAGE, "env", "hpc", "__mp_main__"}
    return {name for name in found if not name.lstrip("_").startswith("cython")}
