"""Run every command in the READMEs' bash blocks, by the first row of HOW that matches it."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import extra_packages
import pytest
from conftest import REPO, environment

# Values of a project with the default answers for the placeholders in its README.
DEFAULTS = json.loads((REPO / "cookiecutter.json").read_text(encoding="utf-8"))
DEFAULTS |= {"project_slug": "my-research", "package_name": "my_research"}
README = {"template": REPO / "README.md", "project": REPO / "{{cookiecutter.project_slug}}" / "README.md"}
README |= {name: REPO / "docs" / f"{name}.md" for name in ("reference", "bring-your-own")}

FINETUNE = "python train.py experiment=finetune_hf model.folder={0}/llama data.files={0}/text.jsonl"


def commands(readme: Path) -> list[str]:
    """Return each command of the bash blocks once: continued lines joined, split at `&&`, without comments."""
    text = re.sub(
        r"\{\{ *cookiecutter\.(\w+) *\}\}", lambda mark: DEFAULTS[mark[1]], readme.read_text(encoding="utf-8")
    )
    blocks = re.findall(r"^ *```bash\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    bare = [re.sub(r"(^|\s+)#(\s.*)?$", "", line).strip() for line in lines]
    return list(dict.fromkeys(command for line in bare for command in line.split(" && ") if command))


class Desk:
    """The place where a command is tested: a new folder, a baked project, and a short run."""

    def __init__(self, folder: Path, project: Path, run, brief_run: Path) -> None:
        self.folder, self.project, self.brief_run = folder, project, brief_run
        self._run = run

    def succeeds(self, command: str, cwd: Path | None = None) -> str:
        done = self._run(command, cwd or self.project)
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        return done.stdout


def as_it_stands(desk: Desk, command: str) -> None:
    desk.succeeds(command)


def elsewhere(file: str, *words: str) -> Callable[[Desk, str], None]:
    """Check the syntax of a command that installs, clones or changes the folder, and that a test has these words of it.

    They are of those that the command consists of, so that a renamed option is found.
    """

    def check(desk: Desk, command: str) -> None:
        desk.succeeds(f"bash -n <<<{shlex.quote(command)}")
        text = (REPO / "tests" / file).read_text()
        used = [word for word in words if word in command]
        assert used and not [word for word in used if word not in text], f"{file} must have {used or words}"

    return check


def made(desk: Desk, command: str) -> None:
    """Check that a make target and the programs that it starts exist, and that campaigns of trials take its words.

    It is not run, as `make test` itself runs this test.
    """
    recipe = desk.succeeds(command.replace("make ", "make --dry-run ", 1), REPO)
    for program, words in re.findall(r"bin/python ((?:tests|benchmarks|docs)/[\w./]+)([^\n|;&]*)", recipe):
        assert (REPO / program).exists(), program
        if program == "tests/trial":
            desk.succeeds(f"python {program} {words.strip()} --help", REPO)


def baked(desk: Desk, command: str) -> None:
    """Bake from this folder instead of GitHub, with the default answers."""
    command = re.sub(r"\S*hpc-ml-template\S*", shlex.quote(str(REPO)), command, count=1)
    command = command if "--no-input" in command else command + " --no-input"
    desk.succeeds(command.replace("cookiecutter", "python -m cookiecutter --default-config", 1), desk.folder)


def sourced(desk: Desk, command: str) -> None:
    """Source env.sh in an environment that it has made, so that nothing is installed."""
    if not Path(sys.prefix, ".complete-my-research").exists():
        pytest.skip("the environment was not made by env.sh: make test")
    desk.succeeds(f"{command} && type -P python")


def brought(desk: Desk, command: str) -> None:
    """Bring one of the ports to a copy of the project, under the name that the page gives it."""
    mine, port = desk.folder / "mine", REPO / "tests" / "ports" / "mnist"
    shutil.copytree(desk.project, mine, ignore=shutil.ignore_patterns("runs"))
    shutil.copy(port / "research_mnist.py", mine / "src" / "mine.py")
    for group in ("model", "data"):
        text = (port / f"{group}.yaml").read_text().replace("research_mnist.", "mine.")
        (mine / "configs" / group / "mine.yaml").write_text(text)
    desk.succeeds(f"python {port / 'make_data.py'} data/mine", mine)
    is_run = any(word in command for word in ("train.py", "check.py", "--dry-run"))
    desk.succeeds(command if is_run else f"{command} --dry-run", mine)


def composed(desk: Desk, command: str) -> None:
    """Compose and print the config only, as the command needs a cluster, a GPU or data."""
    assert "_target_" in desk.succeeds(f"{command} --cfg job")


def submitted(desk: Desk, command: str) -> None:
    """Print the job script instead of submitting it. With `resume=`, make a run as submit.py leaves it."""
    if "--after" in command:
        command = re.sub(r"(--after |ckpt=)\S+", rf"\g<1>{shlex.quote(str(desk.brief_run))}", command)
    run_dir = desk.folder / "run"
    if "resume=" in command:
        run_dir.mkdir()
        shutil.copytree(desk.project, run_dir / "code", symlinks=True, ignore=shutil.ignore_patterns("runs", ".venv"))
        shutil.copytree(REPO / "src" / "hpc", run_dir / "code" / "src" / "hpc")
        (run_dir / "config.yaml").write_text(desk.succeeds("python train.py cluster=slurm --cfg job --resolve"))
        (run_dir / "overrides.json").write_text('["cluster=slurm"]')
        (run_dir / "job.sh").write_text(desk.succeeds("python submit.py cluster=slurm trainer=gpu --dry-run"))
    script = desk.succeeds(re.sub(r"resume=\S+", f"resume={shlex.quote(str(run_dir))}", command) + " --dry-run")
    _, begin, script = script.partition("#!")  # a moved run prints its changes before the script
    desk.succeeds(f"bash -n <<<{shlex.quote(begin + script)}")


def rendered(desk: Desk, command: str) -> None:
    """Render the scripts into another folder."""
    desk.succeeds(re.sub(r"--render \S+", f"--render {shlex.quote(str(desk.folder / 'slurm'))}", command))


def given_to_slurm(desk: Desk, command: str) -> None:
    """Check that the script exists and is valid bash. test_slurm_scripts.py runs it with Slurm."""
    elsewhere(desk, command)
    desk.succeeds(f"bash -n {command.split()[-1]}")


def resumed(desk: Desk, command: str) -> None:
    """Resume a run that was interrupted before its test."""
    run_dir = desk.folder / "run"
    desk.succeeds(f"python train.py trainer.max_steps=2 run_dir='{run_dir}'")
    (run_dir / "verdict").unlink()
    desk.succeeds(command.replace("runs/NAME", shlex.quote(str(run_dir))))
    assert "finished" in (run_dir / "verdict").read_text()


def exported(desk: Desk, command: str) -> None:
    out = desk.folder / command.split()[3]
    desk.succeeds(
        command.replace("runs/NAME", shlex.quote(str(desk.brief_run))).replace(out.name, shlex.quote(str(out)))
    )
    assert out.stat().st_size > 1000


@patch.dict(os.environ, extra_packages.ENVIRON)
def finetuned(desk: Desk, command: str) -> None:
    """Fine-tune a small model for two steps, or export it. Model and run are made once for all commands."""
    mine, shared = desk.folder / "mine", desk.brief_run.parent
    small, run = shared / "small", shared / "finetuned"
    if not small.exists():
        desk.succeeds(f"python {REPO / 'tests' / 'small_models.py'} {small}")
    places = {"/models/llama_mine": mine, "/models/llama": small / "llama", "/data/text": small, "runs/NAME": run}
    for place, here in places.items():
        command = command.replace(place, str(here))
    words = "trainer=cpu trainer.max_steps=2 data.block_size=16"
    train = f"HF_HOME={small} {command if 'train.py' in command else FINETUNE.format(small)} {words}"
    if "train.py" in command or not run.exists():
        desk.succeeds(f"{train} run_dir={desk.folder / 'run' if run.exists() else run}")
    if "export.py" in command:
        desk.succeeds(command)
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in mine.iterdir()}


def reported(desk: Desk, command: str) -> None:
    desk.succeeds(command.replace("runs/NAME", shlex.quote(str(desk.brief_run))))
    assert (desk.brief_run / "report.html").exists()


def predicted(desk: Desk, command: str) -> None:
    """Predict with the short run."""
    said = desk.succeeds(command.replace("runs/NAME", str(desk.brief_run)))
    assert re.fullmatch(r"tensor\(\[\d\]\) tensor\(\d\)\n", said), said


def packed(desk: Desk, command: str) -> None:
    """Pack a few small files that are made here."""
    from PIL import Image
    from tokenizers import Tokenizer, models

    for i in range(60):
        image = desk.folder / "photos" / f"class{i % 2}" / f"{i}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 7), (i, 0, 0)).save(image)
    (desk.folder / "books").mkdir()
    (desk.folder / "books" / "one.txt").write_text("to be or not to be\n" * 1000)
    Tokenizer(models.BPE({"t": 0, "o": 1}, [])).save(str(desk.folder / "tokenizer.json"))
    desk.succeeds(command.replace("/data/", f"{desk.folder}/"))
    assert list(desk.folder.glob("*.npy"))


def trained(desk: Desk, command: str) -> None:
    """Train two steps in a new folder. A checkpoint in the command is replaced by one of the short run."""
    checkpoint = next((desk.brief_run / "checkpoints").iterdir())
    command = re.sub(r"ckpt=\S+", f"ckpt={shlex.quote(str(checkpoint))}", command)
    command = re.sub(r" (trainer\.max_steps|run_dir)=\S+", "", command)
    desk.succeeds(f"{command} trainer.max_steps=2 run_dir={desk.folder / 'run'}")


def scaled(desk: Desk, command: str) -> None:
    """Submit to a stub of Slurm. test_slurm_scale.py runs the jobs with a real one."""
    for name, answer in {"sbatch": "echo 17", "squeue": "echo 17 PENDING None"}.items():
        (desk.folder / name).write_text(f"#!/bin/bash\n{answer}\n")
        (desk.folder / name).chmod(0o755)
    out = desk.folder / "study"
    words = f"cluster.container=none out={shlex.quote(str(out))}"
    desk.succeeds(f"PATH={shlex.quote(str(desk.folder))}:$PATH {command} {words}")
    assert len(list(out.glob("nodes-*/job.sh"))) == 4


def planned(desk: Desk, command: str) -> None:
    links = {"within": None, "across": {"gbs": 1.0}}
    network = {"backend": "nccl", "ranks_per_node": 8, "links": links}  # as in network.json of tools/comm.py
    (desk.folder / "network.json").write_text(json.dumps(network))
    said = desk.succeeds(re.sub(r"network=\S+", f"network={shlex.quote(str(desk.folder))}", command))
    if "--json" in command:
        assert json.loads(said[said.index("{") :])["memory"]["total"] > 0
    else:
        assert "memory of a GPU" in said and "tokens/s" in said


def dry(desk: Desk, command: str) -> None:
    """Print the job script instead of submitting it."""
    script = desk.succeeds(command.replace("--wait", "--dry-run"))
    desk.succeeds(f"bash -n <<<{shlex.quote(script)}")


def boarded(desk: Desk, command: str) -> None:
    """Start TensorBoard, request the address that it prints, and end it by SIGINT, as Ctrl-C does."""
    command = re.sub(r"runs/\w+", shlex.quote(str(desk.brief_run)), command)
    command = command if str(desk.brief_run) in command else f"{command} {shlex.quote(str(desk.brief_run))}"
    board = subprocess.Popen(
        ["bash", "-c", f"exec {command}"],
        cwd=desk.project,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job's shell ignores it
    )
    try:
        said = board.stdout.readline()
        address = re.search(r"http://\S+", said)
        assert address and answers(address[0], board), said
    finally:
        board.send_signal(signal.SIGINT)
        assert board.wait(timeout=30) == 0


def collected(desk: Desk, command: str) -> None:
    """Collect the tests only; test_fork.py runs them."""
    desk.succeeds(f"{command} --collect-only -q")


def served(desk: Desk, command: str) -> None:
    """Start the server, send requests until it answers, and end it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = f"exec {command} --host 127.0.0.1 --port {port}"
    with (desk.folder / "log").open("w+") as log:
        server = subprocess.Popen(
            ["bash", "-c", command], cwd=desk.project, env=environment(), stdout=log, stderr=log, start_new_session=True
        )
        try:
            assert answers(f"http://127.0.0.1:{port}/", server), (desk.folder / "log").read_text()
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(timeout=30)


def answers(address: str, server: subprocess.Popen, seconds: float = 90) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(address, timeout=10) as answer:
                return answer.status == 200
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    return False


INSTALLING = ("PIP_FIND_LINKS", "PIP_NO_INDEX", "VERSIONS", "module")
# A pattern for the whole command, and how it is tested. A command that matches no row fails: add a row.
HOW = [
    (r"python (train|submit|tools/check)\.py model=mine.*", brought),
    (r"python train\.py experiment=finetune_hf .*|python tools/export\.py .* --hf", finetuned),
    (r"make \w+", made),
    (r"python -m pip wheel .*", elsewhere("test_env.py", "wheel", "--wheel-dir")),
    (r"python -m pip install .* transformers", elsewhere("extra_packages.py", "peft", "transformers")),
    (r"python -m pip install .*", elsewhere("requirements.txt", "wandb")),
    (r"for one in .*wandb .*", elsewhere("hpc/logging/test_loggers_offline.py", "sync")),
    (r"mlflow .*", elsewhere("hpc/logging/test_loggers_offline.py", "sqlite:///")),
    (r"git (init|add|commit)\b.*", elsewhere("conftest.py", "init", "add", "commit")),
    (r"cruft .*", elsewhere("test_update.py", "update")),
    (r"(PIP_FIND_LINKS=|VERSIONS=site|apptainer|module load).*", elsewhere("test_env.py", *INSTALLING)),
    (r"cookiecutter .*", baked),
    (r"(VENV=\S+ )?source (\./)?env\.sh", sourced),
    (r"(python -m )?tensorboard.*", served),
    (r"(python -m )?pytest.*", collected),
    (r"(python -m )?(ruff|pyright).*", as_it_stands),
    (r"python report\.py runs/NAME", reported),
    (r"PYTHONPATH=src python -c .*", predicted),
    (r"python report\.py", as_it_stands),
    (r"python plan\.py .*", planned),
    (r"python tools/board\.py.*", boarded),
    (r"python tools/cluster\.py .*", elsewhere("test_slurm_cluster.py", "tools/cluster.py", "--job", "--compare")),
    (r"python submit\.py trainer=ddp_4node cluster=mine", elsewhere("test_slurm_cluster.py", "ddp_4node")),
    (r"python tools/comm\.py .*accelerator=cpu.*", as_it_stands),
    (r"python tools/comm\.py .*", dry),  # test_slurm_comm.py runs it with Slurm
    (r"python submit\.py.* --render .*", rendered),
    (r"python submit\.py.*", submitted),
    (r"sbatch runs/NAME/job\.sh", elsewhere("test_slurm_requeue.py", "sbatch", "job.sh")),
    (r"(sbatch|salloc) .*", given_to_slurm),
    (r"python train\.py resume=runs/NAME", resumed),
    (r"python tools/export\.py .*", exported),
    (r"python tools/pack\.py .*", packed),
    (r"python tools/scale\.py .*", scaled),
    (r"python train\.py .*--(help|cfg).*", as_it_stands),
    (r"eval .*python train\.py -sc install=bash.*", as_it_stands),
    # `trainer=fsdp trainer.accelerator=cpu` and the default trainer run everywhere.
    (
        r"python train\.py(?!.*(_4node|num_nodes=|cluster=|data[.=]))(?=.*accelerator=cpu|(?!.*trainer=(?!cpu))).*",
        trained,
    ),
    (r"python train\.py.*", composed),
]


@pytest.fixture(scope="module")
def brief_run(project: Path, run, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    done = run(f"python train.py trainer.max_steps=2 run_dir='{folder}'", project)
    assert done.returncode == 0, done.stdout
    return folder


@pytest.fixture
def desk(tmp_path: Path, project: Path, run, brief_run: Path) -> Desk:
    return Desk(tmp_path, project, run, brief_run)


# Each command once, with the first page that has it.
PAGES = {command: page for page in reversed(README) for command in commands(README[page])}


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, id=f"{page}: {command}", marks=pytest.mark.soak if "check.py" in command else ())
        for command, page in PAGES.items()
    ],
)
def test_command(command: str, desk: Desk) -> None:
    how = next((how for pattern, how in HOW if re.fullmatch(pattern, command)), None)
    assert how, f"say in HOW how this is run: {command}"
    how(desk, command)


def test_quoted_messages_are_those_of_the_sources() -> None:
    """Check that messages in the reference's table occur in the sources. The sign … stands for variable parts."""
    table = README["reference"].read_text(encoding="utf-8").split("| what is wrong | message |")[1].split("\n\n")[0]
    messages = re.findall(r"`([^`]+)`", "".join(row.split("|")[2] for row in table.splitlines()[2:]))
    sources = "".join(path.read_text(encoding="utf-8") for path in (REPO / "src").rglob("*.py"))
    pieces = [piece.strip() for message in messages for piece in message.split("…") if piece.strip()]
    assert len(messages) > 5 and not [piece for piece in pieces if piece not in sources]


@pytest.mark.parametrize("readme", README)
def test_there_are_commands(readme: str) -> None:
    assert commands(README[readme])
