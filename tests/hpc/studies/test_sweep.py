"""Check sweeps of one command line: the members of a job array, and the files that they share."""

import json
import os
from pathlib import Path

import pytest
import typed_fixes
from desk import Desk
from omegaconf import OmegaConf

from hpc.config import compose, conversion, parse
from hpc.config.errors import ConfigError
from hpc.run import directory, frozen_config, history
from hpc.studies import sweep

FOLDER = Path("/runs/sweep")


def test_members_are_all_combinations_with_a_directory_each() -> None:
    typed = ["cluster=slurm", "seed=1,2", "data=digits", "model.optimizer.lr=1e-3,0.01"]
    cfgs = [cfg for cfg, _ in sweep.compose_members(typed, FOLDER)]
    assert [(cfg.seed, cfg.model.optimizer.lr) for cfg in cfgs] == [(1, 0.001), (1, 0.01), (2, 0.001), (2, 0.01)]
    assert [Path(cfg.run_dir).parent for cfg in cfgs] == [FOLDER] * 4
    names = [Path(cfg.run_dir).name for cfg in cfgs]
    assert names[0] == "0_seed=1_model.optimizer.lr=0.001" and len(set(names)) == 4


@pytest.mark.parametrize(
    ("typed", "values"),
    [
        ("seed=range(3)", [0, 1, 2]),
        ("cluster.account=0123,0456", ["0123", "0456"]),
        ("cluster.time=1:00:00,2-12", ["1:00:00", "2-12"]),
        ("cluster.partition=no,yes", ["no", "yes"]),
        ("ckpt=/a b/x.ckpt,'/c,d'", ["/a b/x.ckpt", "/c,d"]),
        ("model.network.widths=[8,16],[16,32]", [[8, 16], [16, 32]]),
        ("name=a,b", ["a", "b"]),
    ],
)
def test_values_of_all_kinds_vary(typed: str, values: list) -> None:
    key = typed.partition("=")[0]
    cfgs = [cfg for cfg, _ in sweep.compose_members([typed], FOLDER)]
    assert [conversion.flatten(cfg)[key] for cfg in cfgs] == values
    assert all(Path(cfg.run_dir).parent == FOLDER for cfg in cfgs)


@pytest.mark.slow
def test_where_only_values_differ_hydra_composes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the configs are those that Hydra would compose one by one."""
    calls = []
    once = compose.hydra_compose
    monkeypatch.setattr(compose, "hydra_compose", lambda *words, **more: calls.append(words) or once(*words, **more))
    values = [
        "seed=range(3)",
        "model.network.widths=[8,16],[16,32]",
        "cluster.account=0123,null",
        "data.batch_size=4,8",
    ]
    for typed, count in (
        ([*values, "cluster=slurm"], 1),
        (["seed=1,2,3", "trainer=ddp,gpu", "name=a,'${seed}'"], 2),
        (["+model.network.extra={a: 1},{b: 2}"], 2),
        (["trainer.precision=16,32"], 2),  # 16-mixed and 32-true
    ):
        members = sweep.compose_members(typed, FOLDER)
        assert len(calls) == count, typed
        for cfg, words in members:
            alone = compose.compose_overrides(words)
            alone.run_dir = cfg.run_dir
            assert alone == cfg and OmegaConf.to_yaml(alone) == OmegaConf.to_yaml(cfg)
        calls.clear()


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["seed=1"], "must have several values"),
        ([], "must have several values"),
        (["seed=range(2000)"], "at most 1000"),
        (["seed=1,2", "run_dir=mine"], "leave run_dir= out"),
        (["sead=1,2"], "seed=..."),
        (["model=gtp_tiny,resnet_digits"], "model=gpt_tiny"),
    ],
)
def test_what_is_no_sweep_is_rejected(typed: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sweep.compose_members(typed, FOLDER)
    assert words in str(caught.value)
    typed_fixes.follow(lambda again: sweep.compose_members(again, FOLDER), typed, caught.value)


def test_without_multirun_several_values_are_rejected(desk: Desk) -> None:
    assert desk.type("cluster=slurm", "seed=1,2") == 2
    assert desk.err.startswith("ConfigError: ") and "--multirun" in desk.err and desk.runs() == []


@pytest.mark.slow
@pytest.mark.parametrize("search", [False, True])
def test_members_share_one_copy_of_the_code_and_one_check_of_room(
    search: bool, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count what a member adds: with a copy and a check of its own, a thousand would write and sync 17 GB."""
    synced: list[int] = []
    monkeypatch.setattr(directory.os, "fsync", lambda file: synced.append(os.fstat(file).st_size))
    drawn = ["seed=choice(1,2,3)", "--search", "random", "--trials", "5"]
    typed = drawn if search else ["seed=1,2,3,4,5", "--multirun"]
    assert desk.type("cluster=slurm", *typed) == 0
    (folder,) = desk.runs()
    assert synced == [directory.MIN_FREE_BYTES]
    members = [Path(line) for line in (folder / "members").read_text().splitlines()]
    own = {"job.sh"} if search else {"job.sh", "config.yaml", "overrides.json"}
    for path in members:
        assert {entry.name for entry in path.iterdir()} == own | {"code"}
        assert (path / "code").readlink() == folder / "code"
        assert sum((path / name).stat().st_size for name in own) < 20_000
    assert len(members) == 5 and len(list(folder.rglob("train.py"))) == 1


def test_two_sweeps_never_share_a_folder(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start two sweeps in one second with the same process id, as two containers may have it."""
    monkeypatch.setattr(directory, "choose_run_dir", lambda *_, **__: desk.project / "runs" / "sweep")
    assert desk.type("cluster=slurm", "seed=1,2", "--multirun") == 0
    assert desk.type("cluster=slurm", "seed=3,4", "--multirun") == 2
    assert "submit again" in desk.err and desk.noted("sbatch.argv").count("job.sh") == 1
    assert len((desk.project / "runs" / "sweep" / "members").read_text().splitlines()) == 2


def test_a_sweep_is_one_array(desk: Desk) -> None:
    desk.scheduler("echo 17")
    typed = ["cluster=slurm", "trainer=ddp", "seed=1,2,3", "--multirun", "--at-once", "2"]
    assert desk.type(*typed) == 0
    (folder,) = desk.runs()
    members = [Path(line) for line in (folder / "members").read_text().splitlines()]
    assert [path.name for path in members] == ["0_seed=1", "1_seed=2", "2_seed=3"]
    assert desk.out.splitlines() == [
        "job 17",
        f"run directory {folder}",
        f"log {folder}/job-17_*.log",
        "asks for at most 3 runs of 1 nodes x 4 tasks, 01:00:00 each: 12 GPU-hours",
    ]
    assert desk.noted("sbatch.argv").splitlines() == ["--parsable", str(folder / "job.sh")]
    script = desk.noted("sbatch.script")
    assert "#SBATCH --array=0-2%2\n" in script and f'#SBATCH --output="{folder}/job-%A_%a.log"\n' in script
    assert [frozen_config.read(path).seed for path in members] == [1, 2, 3]
    saved = [json.loads((path / "overrides.json").read_text()) for path in members]
    assert saved == [["cluster=slurm", "trainer=ddp", f"seed={seed}"] for seed in (1, 2, 3)]
    assert not (folder / "overrides.json").exists()
    for path in members:
        assert (path / "code" / "train.py").read_text() == "# train.py\n" and (path / "code").is_symlink()
    assert json.loads((folder / "submitted.json").read_text())["job"] == "17"
    # one of them alone, afterwards
    desk.scheduler("echo 18")
    assert desk.type(f"resume={members[1]}", "--parsable") == 0 and desk.out == f"18 {members[1]}\n"
    assert "--array" not in desk.noted("sbatch.script")


@pytest.mark.slow
@pytest.mark.parametrize("search", [False, True])
def test_on_whole_nodes_the_runs_of_an_array_share_them(search: bool, desk: Desk) -> None:
    desk.scheduler("echo 17")
    drawn = ["seed=choice(1,2,3)", "--search", "random", "--trials", "6"]
    typed = drawn if search else ["seed=1,2,3,4,5,6", "--multirun"]
    assert desk.type("cluster=slurm", "cluster.whole_nodes=true", "trainer=gpu", *typed) == 0
    (folder,) = desk.runs()
    script = desk.noted("sbatch.script")
    assert "#SBATCH --array=0-1\n" in script and "#SBATCH --gpus-per-node=4\n" in script
    assert script.endswith("}; run_members\n") and ('--draw "$run_dir"' in script) == search
    size = "asks for at most 6 runs of 1 nodes x 1 tasks, 01:00:00 each, 4 on a node: 8 GPU-hours, 2 of them for"
    assert desk.out.splitlines()[2:] == [f"log {folder}/*/job-17_*.log", f"{size} GPUs that stay idle"]
    assert json.loads((folder / "submitted.json").read_text())["runs_per_node"] == 4
    members = [Path(line) for line in (folder / "members").read_text().splitlines()]
    assert [history.read_run(path, path.name).job for path in members] == ["17_0"] * 4 + ["17_1"] * 2


def test_a_run_that_failed_beside_others_is_submitted_alone_while_they_go_on(desk: Desk) -> None:
    desk.scheduler("echo 17")
    assert desk.type("cluster=slurm", "cluster.whole_nodes=true", "trainer=gpu", "seed=1,2", "--multirun") == 0
    (folder,) = desk.runs()
    first, second = (Path(line) for line in (folder / "members").read_text().splitlines())
    desk.command("squeue", "echo '17_0 RUNNING None'")
    for text in ("", "17_0 continue\n", "16_0 failed\n"):
        (second / "ended").write_text(text)
        assert desk.type(f"resume={second}") == 2 and "Its job 17_0 is running" in desk.err
    (second / "ended").write_text("17_0 failed\n")
    desk.scheduler("echo 18")
    assert desk.type(f"resume={second}") == 0
    script = desk.noted("sbatch.script")
    assert "}; run_members" not in script and "--gpus-per-node=1\n" in script and "--array" not in script
    assert desk.out.splitlines()[-1].endswith("x 1 tasks, 01:00:00: 4 GPU-hours, 3 of them for GPUs that stay idle")
    assert history.read_run(second, "b").job == "18" and history.read_run(first, "a").job == "17_0"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["trainer=ddp,ddp_4node"], "here nodes is 1 and 4"),
        (["trainer=ddp", "trainer.devices=1,2"], "here tasks_per_node is 1 and 2"),
        (["cluster.time=1:00:00,2:00:00"], "here walltime_seconds is 3600 and 7200"),
        (["seed=1,x"], "int"),
        (["data.global_batch_size=64,0"], "at least 1"),
        (["name=a,b c"], "name"),
        (["seed=1,2", "--at-once", "0"], "at least 1"),
        (["seed=1,2", "--cfg", "job"], "--cfg cannot be combined with --multirun"),
        (["seed=1"], "several values"),
    ],
)
def test_a_sweep_that_cannot_be_one_array_writes_nothing(typed: list[str], words: str, desk: Desk) -> None:
    assert desk.type("cluster=slurm", *typed, "-m") == 2
    assert words in desk.err and desk.runs() == [] and desk.noted("sbatch.argv") == ""


def test_names_may_differ() -> None:
    from hpc.jobs import job

    cfgs = [parse.parse(node) for node, _ in sweep.compose_members(["cluster=slurm", "name=a,b"], FOLDER)]
    sweep.reject_different_requests([job.job_from_config(cfg, code=Path(cfg.run_dir)) for cfg in cfgs])
