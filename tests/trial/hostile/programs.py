"""Start the programs of a baked project, in a process that has imported the libraries."""

import json
import os
import runpy
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from trial.hostile import training


def enter(case: Any, project: Path) -> None:
    """Start a program as a shell would."""
    from hpc.config import compose, personal_clusters, trust

    if case.configs:
        for module in (compose, trust):
            module.CONFIGS = case.configs
        trust.TRUSTED_FILE = case.configs / "trusted.yaml"
    if case.personal:
        personal_clusters.PERSONAL_CLUSTERS = case.personal
    if case.host:
        socket.gethostname = lambda: case.host  # the hostname that the program sees
    sys.argv = [case.program, *case.words]
    own = {
        "training": training.enter,
        "train.py": train,
        "load": load,
        "weights": weights,
        "begin": begin,
        "restore": restore,
        "check": check,
        "bake": bake,
        "tunnel": tunnel,
    }
    if case.program in own:
        own[case.program](project)
        return
    _harmless()
    runpy.run_path(str(project / case.program), run_name="__main__")


def _harmless() -> None:
    """Let the program exit instead of becoming TensorBoard or tracing a network."""
    from hpc.plan import trace_cache

    def exit_instead(*_: Any, **__: Any) -> Any:
        sys.exit(0)

    trace_cache.load_trace = exit_instead
    os.execve = exit_instead  # type: ignore[assignment]


def train(project: Path) -> None:
    """Run train.py up to the point where ranks would meet."""
    import train as program
    from hpc.config import build
    from hpc.launch import placement
    from hpc.run import command_line, directory
    from hpc.run.program import rank_process
    from hpc.training import attempt

    def stop_before_meeting(cfg: Any, this: Any) -> Any:
        from datetime import datetime

        from hpc.launch import node_checks

        place = this.place
        run_dir = directory.choose_run_dir(
            cfg.run_dir, cfg.name, now=datetime.now(), environ=os.environ, step=place.step or "0"
        )
        node_checks.check_agreement([node_checks.collect_node_facts(cfg, place, environ=os.environ)])
        if place.launcher != "none":
            placement.export_rank_variables(place, os.environ, host_suffix=cfg.cluster.master_addr_suffix)
            placement.num_usable_cores(place.local_world_size or 1, os.environ)
        build.build(cfg.model)
        print(ascii(str(run_dir)))
        sys.exit(0)

    attempt._begin_watched = stop_before_meeting
    with rank_process() as this:
        program.train(command_line.compose(program.__doc__, this.arguments), this)


def load(project: Path) -> None:
    from hpc.checkpoint import trained
    from hpc.config import errors

    with errors.exit_on_config_error():
        trained.load(sys.argv[1])


def weights(project: Path) -> None:
    from hpc.checkpoint import weights
    from hpc.config import errors

    with errors.exit_on_config_error():
        weights.read(sys.argv[1])


def begin(project: Path) -> None:
    """Do what rank 0 does with a run directory before training: find the checkpoint, and read it as plain data."""
    from hpc.checkpoint import safe_unpickle
    from hpc.config import build, errors
    from hpc.logging import loggers, positions
    from hpc.run import attempt_log, command_line, skipped_samples
    from hpc.training import starting_point

    run_dir = Path(sys.argv[1])
    with errors.exit_on_config_error():
        cfg = command_line.compose_resumed(run_dir, [])
        start = starting_point.claim_and_find_checkpoint(run_dir, "host", environ={})
        if checkpoint := start.checkpoint:
            events = attempt_log.read_events(run_dir)
            made = loggers.build_loggers(cfg, checkpoint, starts=events, writer="attempt-9-ab", is_writing=True)
            positions.truncate_logs(
                run_dir,
                list(made.values()),
                positions=checkpoint.details.get("logs", {}),
                writers=positions.writers(events),
            )
            skipped_samples.num_skipped_batches(run_dir, checkpoint.step, attempt=start.attempt)
            with safe_unpickle.convert_unpickling_errors(checkpoint.path, "resume"):
                safe_unpickle.load_plain(checkpoint.path / "meta.pt")
                safe_unpickle.load_plain(checkpoint.path / "rank-0.pt")
        build.build(cfg.model)
        start.claim.release()


def restore(project: Path) -> None:
    """Restore attributes as a resumed run does, and read its data: they are the config's, whatever was restored."""
    from hpc.config import build, compose, errors
    from hpc.state import attributes, trainer_settings

    file, packed = sys.argv[1:]
    forged = json.loads(Path(file).read_text())
    with errors.exit_on_config_error():
        cfg = compose.compose_overrides(["data=packed", f"data.file={packed}", "+data.num_workers=0"])
        data, module = build.build_data(cfg), build.build(compose.compose_overrides([]).model)
        given = {name: getattr(data, name) for name in ("file", "stage", "node_local", "num_workers", "seed")}
        loop = SimpleNamespace(_combined_loader=None)
        trainer: Any = SimpleNamespace(datamodule=data, fit_loop=loop, callbacks=[], lr_scheduler_configs=[])
        trainer.optimizers = [torch.optim.SGD(module.parameters(), 0.1)]
        trainer.is_global_zero, trainer.strategy = True, SimpleNamespace(root_device=torch.device("cpu"))
        attributes.restore_silently(trainer, module, changed=forged["attributes"])
        attributes.restore(trainer, module, changed=forged["attributes"])
        trainer_settings.restore(trainer, forged["settings"])
        assert {name: getattr(data, name) for name in given} == given
        data.prepare_data()
        data.setup("fit")
        assert len(data.dataset("train")) and len(list(module.parameters()))


def check(project: Path) -> None:
    from hpc.config import arguments, build, errors, parse
    from hpc.run import command_line

    with errors.exit_on_config_error():
        cfg = command_line.compose(None, sys.argv[1:])
        arguments.check_files(parse.parse(cfg))
        build.build(cfg.data)


def tunnel(project: Path) -> None:
    from hpc.report import board

    print("\n".join(board.address_lines(6006, host=board.name_of_this_host(), login_host=None)))


def bake(project: Path) -> None:
    """Run only the hook that checks the answers; test_bake.py bakes what it accepts."""
    from cookiecutter.environment import StrictEnvironment

    template = Path(__file__).resolve().parents[3]
    answers = json.loads((template / "cookiecutter.json").read_text())
    answers = {key: value[0] if isinstance(value, list) else value for key, value in answers.items()}
    plain = {key: value for key, value in answers.items() if isinstance(value, str) and "{" not in value}
    given = dict(word.split("=", 1) for word in sys.argv[1:])
    known = {"project_slug": "my-research", "package_name": "my_research"} | plain | given
    inner = {"_template": str(template), "_output_dir": os.getcwd(), "_repo_dir": str(template), "_checkout": None}
    text = (
        StrictEnvironment(context={"cookiecutter": {}})
        .from_string((template / "hooks/pre_gen_project.py").read_text())
        .render(cookiecutter={**answers, **known, **inner})
    )
    os.mkdir("baked")
    os.chdir("baked")
    try:
        exec(compile(text, "pre_gen_project.py", "exec"), {"__name__": "__main__"})
    except SystemExit as ended:
        if ended.code:
            sys.stderr.write(str(ended.code) + "\n")
            sys.exit(2)
