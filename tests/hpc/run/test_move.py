"""Check a run that resumes elsewhere: permitted changes, rejected changes, and the record of a change."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from desk import Desk, qstat
from fork import ENVIRON, PROJECT
from omegaconf import OmegaConf
from test_startup import COMPOSING, PROBE, libraries

from hpc.config import arguments, defaults, parse, personal_clusters, project
from hpc.config import compose as config_compose
from hpc.config.errors import ConfigError
from hpc.jobs import job_states
from hpc.run import command_line, frozen_config

pytestmark = pytest.mark.slow

SLURM = ["cluster=slurm", "trainer=ddp_4node"]
CACHE = "callbacks.compile_cache.enabled"


def started(run_dir: Path, *words: str) -> Path:
    """Return a run directory as the first attempt leaves it."""
    cfg = config_compose.compose_overrides(words)
    cfg.run_dir = str(run_dir)
    arguments.check_files(parse.parse(cfg))
    run_dir.mkdir()
    frozen_config.create_or_replace(run_dir, cfg, words=words)
    return run_dir


def compose(run_dir: Path, *words: str):
    """Compose the config of a resumed run as every rank does, and check the rules."""
    cfg = command_line.compose(None, [f"resume={run_dir}", *words])
    parse.parse(cfg)
    return cfg


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return started(tmp_path / "run", *SLURM)


@pytest.fixture
def configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the project's configs, to be edited."""
    shutil.copytree(project.CONFIGS, tmp_path / "configs")
    monkeypatch.setattr(config_compose, "CONFIGS", tmp_path / "configs")
    return tmp_path / "configs"


def edit(file: Path, was: str, now: str) -> None:
    assert was in file.read_text()
    file.write_text(file.read_text().replace(was, now))


def own_cluster(configs: Path, name: str, was: str, now: str) -> None:
    """Edit a cluster's file."""
    edit(configs / "cluster" / f"{name}.yaml", was, now)


# -- Permitted changes --


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (["trainer.num_nodes=2"], ["trainer.num_nodes: 4 -> 2"]),
        (["trainer.devices=2"], ["trainer.devices: 4 -> 2"]),
        (
            ["cluster.time=4:00:00", "cluster.partition=big"],
            ["cluster.partition: null -> big", "cluster.time: 1:00:00 -> 4:00:00"],
        ),
        (["checkpoint.keep=5"], ["checkpoint.keep: 2 -> 5"]),
        (["faults.nonfinite=rollback"], ["faults.nonfinite: stop -> rollback"]),
        (["+data.num_workers=2"], ["data.num_workers: (nothing) -> 2"]),
        (["callbacks.progress.refresh_rate=1"], ["callbacks.progress.refresh_rate: 10 -> 1"]),
        (["logger.tensorboard.default_hp_metric=true"], ["logger.tensorboard.default_hp_metric: false -> true"]),
        (["dirty_tree=refuse"], ["dirty_tree: snapshot -> refuse"]),
        (["trainer.max_epochs=30"], ["trainer.max_epochs: 20 -> 30"]),
        (
            ["trainer.precision=32-true"],
            ["trainer.precision: bf16-mixed -> 32-true"],
        ),
        (
            ["strategy.compile=false"],
            [f"{key}: true -> false" for key in ("strategy.compile", CACHE)],
        ),
        (["trainer.num_nodes=4"], []),
        ([], []),
    ],
    ids=lambda words: " ".join(words) or "-",
)  # fmt: skip
def test_a_run_moves(words: list[str], lines: list[str], run: Path) -> None:
    cfg = compose(run, *words)
    assert sorted(frozen_config.list_changes(run, cfg)) == sorted(lines)
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        assert str(OmegaConf.select(cfg, key)).lower() == value
    assert cfg.run_dir == str(run)


def test_to_another_strategy_and_cluster(run: Path) -> None:
    cfg = compose(run, "strategy=fsdp", "cluster=pbs", "trainer.num_nodes=1")
    parse.parse(cfg, for_job=True)
    assert (cfg.strategy.name, cfg.cluster.scheduler) == ("fsdp", "pbs")
    assert cfg.trainer.strategy.data_parallel_size == 4
    assert "trainer.strategy.gradient_as_bucket_view: true -> (nothing)" in frozen_config.list_changes(run, cfg)


def test_what_each_rank_composes_is_the_same_and_writes_nothing(run: Path) -> None:
    before = {path: path.read_bytes() for path in run.iterdir()}
    first, second = (OmegaConf.to_container(compose(run, "trainer.num_nodes=2"), resolve=True) for _ in range(2))
    assert first == second and {path: path.read_bytes() for path in run.iterdir()} == before


def test_the_rules_hold_after_a_move(run: Path) -> None:
    with pytest.raises(ConfigError, match="must be divisible by data-parallel size"):
        compose(run, "trainer.num_nodes=3")
    with pytest.raises(ConfigError, match="at least 1"):
        compose(run, "trainer.num_nodes=0", "strategy=deepspeed_zero2")


def test_a_persons_own_values_count(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "clusters.yaml").write_text("slurm: {account: mine, partition: theirs}")
    monkeypatch.setattr(personal_clusters, "PERSONAL_CLUSTERS", tmp_path / "clusters.yaml")
    cfg = compose(run, "cluster.partition=big")
    assert (cfg.cluster.account, cfg.cluster.partition) == ("mine", "big")


@pytest.mark.parametrize(("before", "task"), [("false", "train"), ("true", "test")])
def test_a_run_of_an_earlier_version_is_resumed(before: str, task: str, run: Path) -> None:
    """Check a config that has `test_only` in the place of `task`, former keys of clusters, and another default name."""
    former = "  setup:\n  - module load python\n  max_time: 24:00:00\n  max_nodes: 2\n"
    edit(run / "config.yaml", "cluster:\n", f"cluster:\n{former}")
    edit(run / "config.yaml", "task: train", f"test_only: {before}")
    edit(run / "config.yaml", "name: digits_resnet\n", "name: digits\n")
    cfg = compose(run) if task == "train" else command_line.compose(None, [f"resume={run}"])
    assert (cfg.task, cfg.name, "test_only" in cfg) == (task, "digits", False)
    assert not {"setup", "max_time", "max_nodes"} & set(cfg.cluster)
    if task == "train":
        shutil.copytree(project.CONFIGS, run / "code" / "configs")  # with the files of clusters of that version
        edit(run / "code/configs/cluster/slurm.yaml", "scheduler: slurm\n", "scheduler: slurm\nmax_nodes: 2\n")
        assert compose(run, "trainer.num_nodes=2").name == "digits"  # composed anew, with today's default name


def test_an_earlier_version_froze_the_checkpoint_of_a_run(tmp_path: Path) -> None:
    for name in ("last", "best"):
        (tmp_path / f"train/checkpoints/{name}.ckpt").mkdir(parents=True)
    run = started(tmp_path / "run", *SLURM, f"ckpt={tmp_path}/train")
    assert compose(run, "trainer.num_nodes=2").ckpt == f"{tmp_path}/train"
    frozen = f"{tmp_path}/train/checkpoints/last.ckpt"
    edit(run / "config.yaml", f"ckpt: {tmp_path}/train\n", f"ckpt: {frozen}\n")
    assert compose(run, "trainer.num_nodes=2").ckpt == frozen
    edit(run / "config.yaml", f"ckpt: {frozen}\n", "ckpt: /other\n")
    with pytest.raises(ConfigError, match="ckpt must stay /other"):
        compose(run, "trainer.num_nodes=2")


def test_a_run_that_an_earlier_version_has_submitted_moves_with_its_own_code(run: Path) -> None:
    (run / "code" / "src" / "hpc" / "jobs" / "cluster").mkdir(parents=True)
    assert compose(run).trainer.num_nodes == 4
    with pytest.raises(ConfigError, match=rf"Try: python {run}/code/.* resume={run}, and these words"):
        compose(run, "trainer.num_nodes=2")


# -- Rejected changes --


@pytest.mark.parametrize(
    ("word", "start", "end"),
    [
        ("seed=3", "seed must stay 1", "got 3."),
        ("data.global_batch_size=128", "data.global_batch_size must stay 64", "got 128."),
        ("data.seed=2", "data.seed must stay 1", "got 2."),
        ("model.optimizer.lr=0.1", "model.optimizer.lr must stay 0.003", "got 0.1."),
        ("+model.optimizer.eps=1e-6", "model.optimizer.eps must stay unset", "got 1e-06."),
        ("~model.optimizer.weight_decay", "model.optimizer.weight_decay must stay 0.05", "got (nothing)."),
        ("model.network.widths=[8,16,32]", "model.network.widths must stay [16, 32, 64]", "got [8, 16, 32]."),
        ("name=other", "name must stay digits_resnet", "got other."),
        ("ckpt=/x.ckpt", "ckpt must stay null", "got /x.ckpt."),
        ("task=test", "task must stay train", "got test."),
        ("run_dir=other", "run_dir=other cannot be given with resume=", "in its own directory."),
    ],
)
def test_science_stays(word: str, start: str, end: str, run: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(run, "trainer.num_nodes=2", word)
    sentence = str(caught.value).splitlines()[0]
    assert sentence.startswith(start) and sentence.endswith(end)
    if "run_dir" not in word:
        assert "ckpt=" not in caught.value.fix.partition("a new run")[2]  # there is none yet
        (run / "checkpoints/last.ckpt").mkdir(parents=True)
        with pytest.raises(ConfigError) as caught:
            compose(run, "trainer.num_nodes=2", word)
        assert f"ckpt={run}/checkpoints/last.ckpt" in caught.value.fix


@pytest.mark.parametrize("batches", ["true", "1", "5"])
def test_a_run_that_goes_on_is_not_tried(batches: str, run: Path) -> None:
    """Reject fast_dev_run for a resumed run.

    Lightning would end the run after these batches, and it would count as finished.
    """
    before = {path: path.read_bytes() for path in run.iterdir()}
    with pytest.raises(ConfigError, match="must be false for a run that is resumed") as caught:
        compose(run, f"+trainer.fast_dev_run={batches}")
    assert caught.value.key == "trainer.fast_dev_run" and f"without resume={run}" in caught.value.fix
    assert not compose(run, "+trainer.fast_dev_run=false").trainer.fast_dev_run
    with pytest.raises(ConfigError, match="must be false for a run that is resumed"):  # without resume=
        frozen_config.create_or_replace(
            run, config_compose.compose_overrides([*SLURM, "+trainer.fast_dev_run=true", f"run_dir={run}"]), words=[]
        )
    assert {path: path.read_bytes() for path in run.iterdir()} == before


def test_an_edited_file_cannot_slip_in(run: Path, configs: Path) -> None:
    edit(configs / "trainer" / "ddp_4node.yaml", "  num_nodes: 4", "  num_nodes: 4\n  log_every_n_steps: 7")
    assert (
        frozen_config.list_changes(run, compose(run, "trainer.num_nodes=2"))[-1] == "trainer.log_every_n_steps: 10 -> 7"
    )
    edit(configs / "model" / "base.yaml", "lr: 0.003", "lr: 0.004")
    assert compose(run).model.optimizer.lr == 0.003  # frozen
    with pytest.raises(ConfigError, match=r"model\.optimizer\.lr must stay 0\.003.*got 0\.004"):
        compose(run, "trainer.num_nodes=2")


def test_neither_does_one_that_no_longer_follows_the_machine(configs: Path, tmp_path: Path) -> None:
    edit(configs / "model" / "base.yaml", "warmup_steps: 20", "warmup_steps: ${trainer.num_nodes}")
    run = started(tmp_path / "run", *SLURM)
    assert compose(run, "trainer.num_nodes=2").model.warmup_steps == 2
    edit(configs / "model" / "base.yaml", "warmup_steps: ${trainer.num_nodes}", "warmup_steps: 3")
    with pytest.raises(ConfigError, match=r"model\.warmup_steps must stay .*got 3"):
        compose(run, "trainer.num_nodes=2")


def test_the_runs_own_configs_are_composed(run: Path, configs: Path) -> None:
    shutil.copytree(configs, run / "code" / "configs")
    defaults.write(run / "code" / "configs")
    edit(configs / "model" / "base.yaml", "lr: 0.003", "lr: 0.004")
    own_cluster(configs, "slurm", "cores_per_gpu: 8", "cores_per_gpu: 9")
    assert frozen_config.list_changes(run, compose(run, "trainer.num_nodes=2")) == ["trainer.num_nodes: 4 -> 2"]
    own_cluster(run / "code" / "configs", "slurm", "cores_per_gpu: 8", "cores_per_gpu: 7")
    edit(run / "code" / "configs/cluster/base.yaml", "rendezvous_seconds: 300", "rendezvous_seconds: 301")
    cluster = compose(run, "trainer.num_nodes=2").cluster
    assert (cluster.cores_per_gpu, cluster.rendezvous_seconds) == (7, 301)


def test_what_the_data_said_of_themselves_stays(tmp_path: Path) -> None:
    from PIL import Image

    for i in range(60):
        file = tmp_path / "images" / f"class{i % 3}" / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 7), (i, 0, 0)).save(file)
    data = ["data=images", f"data.dir={tmp_path}/images", "model=resnet18", "data.global_batch_size=8"]
    run = started(tmp_path / "run", *data, "trainer=ddp", "cluster=slurm")
    cfg = compose(run, "trainer.devices=2")
    assert cfg.data.num_classes == cfg.model.network.num_classes == 3
    assert frozen_config.list_changes(run, cfg) == ["trainer.devices: 4 -> 2"]
    with pytest.raises(ConfigError, match=r"data\.num_classes must stay 3.*got 4"):
        compose(run, "data.num_classes=4")
    with pytest.raises(ConfigError, match=r"warmup_steps must stay 500.*got null"):  # no check fills in this value
        compose(run, "model.warmup_steps=null")


# -- Recorded changes --


def test_a_move_is_kept(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "verdict").write_text("attempt 1\nstep 9\noutcome failed\nwhy x\n")
    for words in (["trainer.num_nodes=2"], ["trainer.num_nodes=2"], ["cluster.time=2:00:00"]):
        frozen_config.create_or_replace(run, compose(run, *words), words=words)
    assert capsys.readouterr().err == "trainer.num_nodes: 4 -> 2\ncluster.time: 1:00:00 -> 2:00:00\n"
    assert json.loads((run / "overrides.json").read_text()) == [*SLURM, "trainer.num_nodes=2", "cluster.time=2:00:00"]
    kept = compose(run)
    assert (kept.trainer.num_nodes, kept.cluster.time, kept.run_dir) == (2, "2:00:00", str(run))
    names = {"config.yaml", "overrides.json"}
    assert {path.name for path in run.iterdir()} == names  # and no verdict on the run as it was before


def test_a_move_is_written_once_it_turns_out_to_be_possible(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that a move that Lightning or the scheduler rejects changes nothing: the run can resume as before."""
    before = {path: path.read_bytes() for path in run.iterdir()}
    words = ["trainer.num_nodes=2"]
    keep = frozen_config.prepare_change(run, compose(run, *words), words=words)
    assert {path: path.read_bytes() for path in run.iterdir()} == before
    assert capsys.readouterr().err == "trainer.num_nodes: 4 -> 2\n"
    keep()
    assert compose(run).trainer.num_nodes == 2
    before = {path: path.read_bytes() for path in run.iterdir()}
    frozen_config.create_or_replace(run, compose(run), words=[])  # nothing has changed
    assert {path: path.read_bytes() for path in run.iterdir()} == before


def test_processes_that_rank_0_starts_may_read_what_it_has_kept(run: Path) -> None:
    words = ["+data.num_workers=2", "~callbacks.progress"]  # Hydra rejects these the second time
    cfg = compose(run, *words)
    frozen_config.create_or_replace(run, cfg, words=words)
    assert json.loads((run / "overrides.json").read_text()) == [*SLURM, *words]
    assert OmegaConf.to_container(compose(run, *words), resolve=True) == OmegaConf.to_container(cfg, resolve=True)
    assert compose(run, "+data.num_workers=3").data.num_workers == 3
    assert compose(run, "data.num_workers=4").data.num_workers == 4


def test_another_config_does_not_take_the_place_of_the_first(run: Path) -> None:
    before = {path: path.read_bytes() for path in run.iterdir()}
    other = config_compose.compose_overrides([*SLURM, "seed=3"])
    other.run_dir = str(run)
    with pytest.raises(ConfigError, match=r"seed must stay 1.*got 3"):
        frozen_config.create_or_replace(run, other, words=["seed=3"])
    assert {path: path.read_bytes() for path in run.iterdir()} == before


def test_the_same_command_line_once_more_is_the_same_run(run: Path) -> None:
    again = command_line.compose_resumed(run, [*SLURM, f"run_dir={run}"])  # a requeued script that names its directory
    assert frozen_config.list_changes(run, again) == []


@pytest.mark.parametrize("text", [None, "", "[1]", "{}", '["a=1"', '"seed=1"'])
def test_without_the_words_it_goes_on_but_does_not_move(text: str | None, run: Path) -> None:
    (run / "overrides.json").unlink()
    if text is not None:
        (run / "overrides.json").write_text(text)
    assert compose(run).trainer.num_nodes == 4
    with pytest.raises(ConfigError, match=r"overrides\.json"):
        compose(run, "trainer.num_nodes=2")


def test_words_that_name_code_are_rejected_where_they_are_kept_too(run: Path) -> None:
    (run / "overrides.json").write_text(json.dumps(["model.network._target_=os.system"]))
    with pytest.raises(ConfigError, match="must be in a trusted package"):
        compose(run, "trainer.num_nodes=2")


def test_a_directory_that_was_copied_does_not_write_into_the_first(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "copy")
    cfg = compose(tmp_path / "copy")
    assert cfg.run_dir == cfg.logger.tensorboard.save_dir == str(tmp_path / "copy")
    (tmp_path / "copy" / "overrides.json").unlink()
    with pytest.raises(ConfigError, match=r"overrides\.json"):
        compose(tmp_path / "copy")
    (tmp_path / "alias").symlink_to(run)
    assert frozen_config.list_changes(run, compose(tmp_path / "alias")) == []


# -- Finished or running runs --


def over(run: Path, outcome: str = "finished") -> None:
    (run / "verdict").write_text(f"attempt 2\nstep 500\noutcome {outcome}\nwhy -\n")


def test_a_finished_run_goes_on_only_to_a_later_end(run: Path) -> None:
    over(run)
    for words in ([], ["trainer.num_nodes=2"], ["trainer.max_epochs=20"], ["trainer.max_epochs=3"]):
        with pytest.raises(ConfigError, match="The run is finished") as caught:
            compose(run, *words)
        assert f"ckpt={run}/checkpoints/last.ckpt" in caught.value.fix and "more than 20" in caught.value.fix
    with pytest.raises(SystemExit):
        command_line.compose(None, [f"resume={run}", "--cfg", "job"])  # printing the config is allowed
    cfg = compose(run, "trainer.max_epochs=21")
    assert cfg.trainer.max_epochs == 21
    frozen_config.create_or_replace(run, cfg, words=["trainer.max_epochs=21"])
    assert compose(run).trainer.max_epochs == 21  # the job reads the change from the run directory


@pytest.mark.parametrize(
    ("limit", "fewer", "more"),
    [
        ("trainer.max_steps=50", "trainer.max_steps=50", "trainer.max_steps=51"),
        ("trainer.max_steps=50", "trainer.max_steps=49", "trainer.max_steps=-1"),
        ("trainer.max_epochs=2", "trainer.max_steps=5", "trainer.max_epochs=null"),
    ],
)
def test_steps_and_no_limit_at_all(limit: str, fewer: str, more: str, tmp_path: Path) -> None:
    run = started(tmp_path / "run", limit)
    over(run)
    with pytest.raises(ConfigError, match=f"The run is finished\\.\n.*{limit.partition('=')[0]}"):
        compose(run, fewer)
    compose(run, more)


@pytest.mark.parametrize("outcome", ["continue", "failed"])
def test_other_verdicts_do_not_stop_it(outcome: str, run: Path) -> None:
    over(run, outcome)
    compose(run)
    compose(run, "trainer.num_nodes=2")


def test_train_rejects_without_torch(run: Path) -> None:
    words = [str(PROJECT), str(project.LIBRARY), str(PROJECT / "train.py"), f"resume={run}", "seed=3"]
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(words)], env=ENVIRON, capture_output=True, text=True, timeout=60
    )
    code, modules, _ = json.loads(done.stdout.splitlines()[-1])
    assert code == 2 and libraries(modules) <= COMPOSING and done.stderr.startswith("ConfigError: seed must stay 1, ")


# -- python submit.py resume=... --


@pytest.fixture
def moving(desk: Desk) -> Desk:
    """Return a desk with a submitted run, from a project with the shipped configs."""
    shutil.copytree(project.CONFIGS, desk.project / "configs", dirs_exist_ok=True)
    assert desk.type(*SLURM, "run_dir=mine") == 0
    desk.scheduler("echo 18")
    return desk


def test_submit_moves(moving: Desk) -> None:
    before = Path("mine/job.sh").read_text()
    assert "--nodes=4\n" in before and "--time=01:00:00\n" in before
    words = ["trainer.num_nodes=2", "cluster.time=4:00:00"]
    assert moving.type("resume=mine", *words, "--dry-run") == 0
    assert sorted(moving.err.splitlines()) == ["cluster.time: 1:00:00 -> 4:00:00", "trainer.num_nodes: 4 -> 2"]
    dry = moving.out
    assert Path("mine/job.sh").read_text() == before
    os.umask(0o077)
    assert moving.type("resume=mine", *words) == 0
    assert sorted(moving.err.splitlines()) == ["cluster.time: 1:00:00 -> 4:00:00", "trainer.num_nodes: 4 -> 2"]
    assert "asks for at most 2 nodes x 4 tasks, 04:00:00: 32 GPU-hours" in moving.out
    script = Path("mine/job.sh").read_text()
    assert script == dry == moving.noted("sbatch.script")
    assert script == before.replace("4 nodes, 16 ranks", "2 nodes, 8 ranks").replace("nodes=4", "nodes=2").replace(
        "--time=01:", "--time=04:"
    )
    assert frozen_config.read(Path("mine")).trainer.num_nodes == 2
    assert json.loads(Path("mine/overrides.json").read_text()) == [*SLURM, "run_dir=mine", *words]
    modes = {path.stat().st_mode & 0o777 for name in ("job.sh", "config.yaml") if (path := Path("mine", name))}
    assert modes == {0o600}
    # Submit again, without changes.
    assert moving.type("resume=mine") == 0 and moving.err == "" and Path("mine/job.sh").read_text() == script


def test_of_two_that_go_on_with_a_run_at_once_one_queues_a_job(moving: Desk) -> None:
    moving.scheduler("for k in {1..200}; do [ -e go ] && break; sleep 0.05; done; echo 19")
    before = moving.noted("sbatch.argv").count("job.sh")
    if (first := os.fork()) == 0:
        os._exit(moving.type("resume=mine"))
    limit = time.monotonic() + 30
    while moving.noted("sbatch.argv").count("job.sh") == before:
        assert time.monotonic() < limit
        time.sleep(0.02)
    assert moving.type("resume=mine") == 2 and "Another submit.py is submitting this run" in moving.err
    Path("go").touch()
    assert os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) == 0
    assert moving.noted("sbatch.argv").count("job.sh") == before + 1
    assert moving.type("resume=mine") == 0  # the scheduler does not report the job


def test_to_pbs(moving: Desk) -> None:
    assert moving.type("resume=mine", "cluster=pbs", "trainer.num_nodes=2") == 0
    script = Path("mine/job.sh").read_text()
    assert moving.noted("qsub.script") == script and "nodes=2 " in script and "#PBS -l select=2:" in script


def test_relative_paths_mean_what_they_meant(desk: Desk, tmp_path: Path) -> None:
    shutil.copytree(project.CONFIGS, desk.project / "configs", dirs_exist_ok=True)
    (tmp_path / "text.txt").write_text("to be or not to be " * 1000)
    data = ["data=text", "data.files=text.txt", "data.block_size=16", "model=gpt_tiny"]
    for cluster in ("slurm", "pbs"):
        desk.set.chdir(tmp_path)
        assert desk.type(f"cluster={cluster}", "trainer=ddp", *data, f"run_dir=by {cluster}") == 0, desk.err
        desk.set.chdir(desk.project)
        assert desk.type(f"resume=../by {cluster}", "trainer.devices=2") == 0, desk.err
        assert frozen_config.read(tmp_path / f"by {cluster}").trainer.devices == 2
        script = (tmp_path / f"by {cluster}/job.sh").read_text()
        assert re.findall(r"(?m)^work_dir=(\S+)", script) == [str(tmp_path)]


def test_a_member_of_a_sweep_moves_alone(desk: Desk) -> None:
    shutil.copytree(project.CONFIGS, desk.project / "configs", dirs_exist_ok=True)
    assert desk.type(*SLURM, "seed=1,2", "--multirun") == 0
    member = desk.runs()[0] / "1_seed=2"
    assert desk.type(f"resume={member}", "trainer.num_nodes=1") == 0, desk.err
    assert (frozen_config.read(member).seed, frozen_config.read(member).trainer.num_nodes) == (2, 1)
    assert desk.type(f"resume={member.parent}") == 2 and "of a sweep" in desk.err


QUEUE = {
    "slurm": 'echo "17 WORD None"',
    "pbs": qstat({"17.s": {"job_state": "WORD"}}),
}


@pytest.mark.parametrize(
    ("scheduler", "word", "said", "cancel"),
    [
        ("slurm", "PENDING", "Its job 17 is pending", "scancel 17"),
        ("slurm", "RUNNING", "Its job 17 is running", "scancel 17"),
        ("slurm", "COMPLETED", None, None),
        ("pbs", "Q", "Its job 17 is pending", "qdel 17"),
        ("pbs", "R", "Its job 17 is running", "qdel 17"),
    ],
)
def test_a_run_whose_job_is_queued_is_left_alone(
    scheduler: str, word: str, said: str | None, cancel: str | None, desk: Desk
) -> None:
    assert desk.type(f"cluster={scheduler}", "trainer=ddp", "run_dir=mine") == 0
    asked = desk.bin / job_states.QUERY_COMMAND[scheduler]
    asked.write_text(f"#!{desk.bin / 'bash'}\n{QUEUE[scheduler].replace('WORD', word)}\n")
    asked.chmod(0o755)
    desk.scheduler("echo 18")
    before = {path: path.read_bytes() for path in Path("mine").iterdir() if path.is_file()}
    code = desk.type("resume=mine")
    if said is None or cancel is None:
        assert code == 0
        return
    assert code == 2 and said in desk.err and cancel in desk.err
    assert {path: path.read_bytes() for path in Path("mine").iterdir() if path.is_file()} == before
    asked.write_text(f"#!{desk.bin / 'bash'}\nexit 1\n")  # it does not answer
    assert desk.type("resume=mine") == 0


def test_a_run_whose_next_job_waits_is_left_alone(desk: Desk) -> None:
    """Check a run on PBS whose next job was queued by the job before it."""
    assert desk.type("cluster=pbs", "trainer=ddp", "run_dir=mine") == 0
    Path("mine/successors").write_text(f"{time.time():.0f} 18.server\n")
    jobs = {"17.server": {"job_state": "F", "Exit_status": 85}, "18.server": {"job_state": "H"}}
    (desk.bin / "qstat").write_text(f"#!{desk.bin / 'bash'}\n{qstat(jobs)}\n")
    (desk.bin / "qstat").chmod(0o755)
    assert desk.type("resume=mine") == 2 and "Its job 18 is pending" in desk.err and "qdel 18" in desk.err
    with Path("mine/successors").open("a") as stream:
        stream.write(f"{time.time():.0f} 19.server\n")
    jobs["19.server"] = {"job_state": "H"}
    (desk.bin / "qstat").write_text(f"#!{desk.bin / 'bash'}\n{qstat(jobs)}\n")
    assert desk.type("resume=mine") == 2 and "qdel 18 19" in desk.err
    jobs["18.server"]["Job_Owner"] = jobs["19.server"]["Job_Owner"] = "ben@login1"
    (desk.bin / "qstat").write_text(f"#!{desk.bin / 'bash'}\n{qstat(jobs)}\n")
    assert desk.type("resume=mine") == 0, "a job of somebody else has this number"


def test_of_an_array_only_the_runs_own_part_counts(desk: Desk) -> None:
    desk.scheduler("echo '29[].server'")
    assert desk.type("cluster=pbs", "trainer=ddp", "seed=1,2", "--multirun") == 0
    told = {"29[0]": job_states.JobState("running", is_active=True), "29[1]": job_states.JobState("failed")}
    desk.set.setattr(job_states, "query_states", lambda scheduler, jobs, owners: told)
    desk.scheduler("echo 30.server")
    assert desk.type(f"resume={desk.runs()[0]}/0_seed=1") == 2 and "29[0] is running" in desk.err
    assert desk.type(f"resume={desk.runs()[0]}/1_seed=2") == 0


def test_submit_does_not_start_what_is_finished(moving: Desk) -> None:
    over(Path("mine"))
    assert moving.type("resume=mine") == 2 and "The run is finished" in moving.err
    assert json.loads(Path("mine/submitted.json").read_text())["job"] == "17"
    assert moving.type("resume=mine", "trainer.max_epochs=40") == 0
    assert not Path("mine/verdict").exists() and frozen_config.read(Path("mine")).trainer.max_epochs == 40
