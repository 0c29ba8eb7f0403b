"""Train each strategy briefly with two commits of this template and compare the final weights bit for bit.

    python benchmarks/same_bits.py OLD_COMMIT [NEW_COMMIT]

Run it with the Python of the tests' environment (.venv). Each run takes the default digits and is seeded. The sha256 is
of the exported tensors: their names, types, shapes and bytes, in order of their names.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
TWO = ["trainer.accelerator=cpu", "trainer.devices=2", "trainer.precision=32-true"]
RUNS = {
    "single": [],
    "ddp": ["trainer=ddp", *TWO],
    "fsdp": ["trainer=fsdp", *TWO],
    "tensor_parallel": ["trainer=fsdp", "strategy=tensor_parallel", "experiment=text", *TWO],
    "deepspeed_zero1": ["trainer=deepspeed", "strategy=deepspeed_zero1", *TWO],
    "deepspeed_zero2": ["trainer=deepspeed", *TWO],
    "deepspeed_zero3": ["trainer=deepspeed", "strategy=deepspeed_zero3", *TWO],
    "zero3_offload": ["trainer=deepspeed", "strategy=zero3_offload", *TWO],
}
STEPS = ["seed=7", "trainer.max_steps=40"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new", nargs="?", default="HEAD")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        projects = [bake(commit, Path(folder) / str(i)) for i, commit in enumerate((arguments.old, arguments.new))]
        hashes = {name: [train(project, name, words) for project in projects] for name, words in RUNS.items()}
    print(f"| strategy | {arguments.old} | {arguments.new} | |\n|---|---|---|---|")
    for name, (old, new) in hashes.items():
        print(f"| {name} | {old[:16]} | {new[:16]} | {'same' if old == new else 'DIFFERENT'} |")
    sys.exit(any(old != new for old, new in hashes.values()))


def bake(commit: str, folder: Path) -> Path:
    """Make a project with the default answers, and with its library, from a commit of this repository."""
    template = folder / "template"
    template.mkdir(parents=True)
    archive = subprocess.run(["git", "-C", str(REPO), "archive", commit], check=True, capture_output=True)
    subprocess.run(["tar", "-x", "-C", str(template)], input=archive.stdout, check=True)
    cookiecutter = [sys.executable, "-m", "cookiecutter", "--no-input", "--default-config"]
    subprocess.run([*cookiecutter, "--output-dir", str(folder), str(template)], check=True, stdout=subprocess.DEVNULL)
    project = folder / "my-research"
    shutil.copytree(template / "src/hpc", project / "src/hpc")  # the library of that commit, not the installed one
    return project


def train(project: Path, name: str, words: list[str]) -> str:
    """Train a run of the project and return the sha256 of its final weights."""
    run_dir, weights = project / "runs" / name, project / f"{name}.safetensors"
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    for command in (
        ["train.py", *words, *STEPS, f"run_dir={run_dir}"],
        ["tools/export.py", str(run_dir), str(weights)],
    ):
        done = subprocess.run(
            [sys.executable, *command], cwd=project, env=environ, capture_output=True, text=True, timeout=600
        )
        if done.returncode:
            sys.exit(f"{' '.join(command)} in {project}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return hash_tensors(weights)


def hash_tensors(file: Path) -> str:
    from safetensors import safe_open

    digest = hashlib.sha256()
    with safe_open(file, framework="np") as tensors:
        for key in sorted(tensors.keys()):
            tensor = tensors.get_tensor(key)
            digest.update(f"{key} {tensor.dtype} {tensor.shape} ".encode() + tensor.tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
