"""A baked project, and a process that has imported the libraries of its programs, from which these are forked."""

import importlib
import os
import pickle
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from trial.program import FIXED, fork

TESTS = Path(__file__).resolve().parents[1]
MODULES = Path(__file__).resolve().parent / "modules"
LIBRARIES = (
    "lightning.pytorch.callbacks", "torch.distributed.checkpoint", "torch.utils.tensorboard", "torchmetrics", "hydra",
    "hydra.core.override_parser.overrides_parser", "torchdata.stateful_dataloader",
    "tensorboard.backend.event_processing.event_accumulator",
)  # fmt: skip
SURROUNDING = ("SLURM_", "PBS_", "HPC_", "MASTER_", "PMI", "MPI_", "COLUMNS")  # variables of a job


def bake(folder: Path) -> Path:
    """Bake a project with the default answers."""
    from cookiecutter.main import cookiecutter

    answers = {"cluster": "local"}
    made = cookiecutter(
        str(TESTS.parent), no_input=True, default_config=True, extra_context=answers, output_dir=str(folder)
    )
    return Path(made)


def warm(libraries: Iterable[str] = LIBRARIES) -> None:
    """Import libraries, so that each forked program has them; without hpc, which belongs to one project."""
    os.environ.update({name: value for name, value in FIXED.items() if name != "HF_HUB_OFFLINE"})
    for library in libraries:
        importlib.import_module(library)


def warm_project(project: Path, cache: Path) -> None:
    """Let this process and all that it forks belong to one project, whose modules it may then import."""
    for name in [name for name in os.environ if name.startswith(SURROUNDING) and name != "HPC_ML_FOLDER"]:
        del os.environ[name]
    os.environ |= {"HPC_PROJECT": str(project), "XDG_CACHE_HOME": str(cache)}
    sys.path[:0] = [str(project), str(project / "src")]
    warm()


def put(project: Path, *names: str) -> None:
    """Put modules into a baked project's package, as files."""
    for name in names:
        folder = MODULES if name != "strike" else MODULES.parent
        shutil.copy(folder / f"{name}.py", project / "src" / "my_research" / f"{name}.py")


def patch(name: str, **values: object) -> str:
    """Return the code of a patch in modules/, after assignments of these values."""
    given = "".join(f"{key} = {value!r}\n" for key, value in values.items())
    return given + (MODULES / f"{name}.py").read_text()


def apart(function: Callable[..., Any], *arguments: Any, project: Path, **keywords: Any) -> Any:
    """Call a function in a forked process, which imports hpc for this project, and return what it returns.

    Raises:
        RuntimeError: it raised.
    """
    with tempfile.TemporaryDirectory(prefix="apart") as made:
        answer, said = Path(made, "answer"), Path(made, "said")

        def body() -> None:
            os.environ["HPC_PROJECT"] = str(project)
            answer.write_bytes(pickle.dumps(function(*arguments, **keywords)))

        os.waitpid(fork(body, said), 0)
        if not answer.exists():
            raise RuntimeError(said.read_text()[-2000:])
        return pickle.loads(answer.read_bytes())
