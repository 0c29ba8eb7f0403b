"""Check what submit.py makes of a scheduler's answers, before it writes anything, with stand-ins for its commands."""

from datetime import datetime, timedelta

import pytest
from desk import Desk
from test_limits import ASSOCIATIONS, NODES, PARTITIONS, QOS

from hpc.jobs import job_states
from hpc.submit import feasibility
from hpc.submit.submission import describe_start

WORDS = ["cluster=slurm", "trainer=ddp_4node", "cluster.cores_per_gpu=4"]


def answers(desk: Desk, test_only: str, *, plugins: str = "(null)") -> None:
    """Install a Slurm whose `sbatch --test-only` is this bash, and whose other commands tell of `test_limits`."""
    desk.command("sbatch", f'if [ "$1" = --test-only ]; then cat >"$0.asked"; {test_only}; exit; fi; echo 17')
    config = f"AccountingStorageEnforce = limits\nJobSubmitPlugins = {plugins}"
    desk.command("scontrol", f"case $* in *partition) cat <<'END'\n{PARTITIONS}END\n;; *config) echo '{config}';; esac")
    desk.command("sinfo", f"cat <<'END'\n{NODES}END")
    desk.command(
        "sacctmgr", f"case $* in *associations*) cat <<'END'\n{ASSOCIATIONS}END\n;; *) echo '{QOS.strip()}' ;; esac"
    )


def test_slurm_is_asked_about_the_script_that_it_gets(desk: Desk) -> None:
    answers(desk, 'echo "sbatch: Job 5 to start at 2030-01-02T03:04:05 using 64 processors on nodes g[1-4]" >&2')
    assert desk.type(*WORDS) == 0
    (run_dir,) = desk.runs()
    assert (desk.bin / "sbatch.asked").read_text() == (run_dir / "job.sh").read_text()
    assert desk.out.splitlines()[-1] == "Slurm expects to start it on 2030-01-02 at 03:04"


def test_what_slurm_takes_and_would_never_start_is_rejected(desk: Desk) -> None:
    answers(desk, 'echo "sbatch: Job 5 to start at 2030-01-02T03:04:05"')
    assert desk.type(*WORDS, "trainer.num_nodes=8") == 2
    assert "trainer.num_nodes must be at most 4, the most nodes of a job in partition gpu; got 8." in desk.err
    assert not desk.runs()


def test_the_partition_is_the_one_that_slurm_names(desk: Desk) -> None:
    """Check that the limits of the default partition say nothing where a plugin chooses another one."""
    start = "sbatch: Job 5 to start at 2030-01-02T03:04:05 using 64 processors on nodes o[1-4] in partition {}"
    answers(desk, f'echo "{start.format("cpu")}"', plugins="lua")
    assert desk.type(*WORDS, "trainer.num_nodes=8") == 0
    answers(desk, f'echo "{start.format("old")}"', plugins="lua")
    assert desk.type(*WORDS, "cluster.time=3:00:00") == 2
    assert "cluster.time must be at most 02:00:00, the longest time of a job in partition old" in desk.err
    answers(desk, "echo 'allocation failure: Requested nodes are busy'; exit 1", plugins="lua")
    assert desk.type(*WORDS, "trainer.num_nodes=8", "name=other") == 0


def test_facts_of_nodes_do_not_overrule_slurm(desk: Desk) -> None:
    answers(desk, 'echo "sbatch: Job 5 to start at 2030-01-02T03:04:05"')
    assert desk.type(*WORDS, "cluster.constraint=unknown") == 0


@pytest.mark.parametrize(
    ("message", "words", "sentence"),
    [
        (
            "allocation failure: Requested node configuration is not available",
            ["cluster.constraint=h100"],
            "cluster.constraint must be features of nodes in partition gpu: a100, ib, large; got h100.",
        ),
        (
            "allocation failure: Invalid account or account/partition combination specified",
            ["cluster.account=scienc"],
            "cluster.account must be one that you may use on this cluster: other, science; got scienc.\n"
            "  Try: cluster.account=science",
        ),
        (
            "allocation failure: Invalid account or account/partition combination specified",
            ["cluster.account=null"],
            "cluster.account must be one that you may use on this cluster: other, science; got null.",
        ),
        (
            "allocation failure: Invalid qos specification",
            ["cluster.account=science", "cluster.qos=long"],
            "cluster.qos must be one that you may use on this cluster: debug, normal; got long.",
        ),
        (
            "sbatch: error: invalid partition specified: GPU\nallocation failure: Invalid partition name specified",
            ["cluster.partition=GPU"],
            "cluster.partition must be a partition of this cluster: gpu, old, cpu; got GPU.",
        ),
        (
            "allocation failure: Invalid license specification",
            [],
            "sbatch: Slurm can never start this job, and says: Invalid license specification. Nothing is queued.",
        ),
    ],
)
def test_a_final_rejection_is_explained(desk: Desk, message: str, words: list[str], sentence: str) -> None:
    answers(desk, f"echo '{message}' >&2; exit 1")
    assert desk.type(*WORDS, *words) == 2
    assert sentence in desk.err
    assert not desk.runs() and not desk.noted("sbatch.argv")


@pytest.mark.parametrize(
    "message",
    [
        "Required node not available (down, drained or reserved)",
        "Requested node configuration is not available",  # said also if a node is drained
    ],
)
def test_what_may_pass_is_left_to_sbatch(desk: Desk, message: str) -> None:
    answers(desk, f"echo 'allocation failure: {message}' >&2; exit 1")
    assert desk.type(*WORDS) == 0
    assert len(desk.runs()) == 1 and "expects" not in desk.out


@pytest.mark.parametrize(
    "answer",
    [
        "echo 'allocation failure: Unable to contact slurm controller (connect failure)' >&2; exit 1",
        "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1",
    ],
)
def test_a_scheduler_that_is_away_leaves_nothing_behind(desk: Desk, answer: str) -> None:
    answers(desk, answer)
    assert desk.type(*WORDS) == 2
    assert desk.err.endswith("Nothing is queued.\n  Try: the same again, in some minutes\n")
    assert not desk.runs()


def test_a_test_that_takes_too_long_is_no_reason(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feasibility, "TEST_SECONDS", 0.2)
    answers(desk, "exec sleep 60")
    assert desk.type(*WORDS) == 0
    assert "note: sbatch --test-only has not answered within 0.2 seconds" in desk.err and len(desk.runs()) == 1


def test_a_job_for_another_cluster_is_not_compared_with_this_one(desk: Desk) -> None:
    answers(desk, 'echo "sbatch: Job 5 to start at 2030-01-02T03:04:05"')
    assert desk.type(*WORDS, "trainer.num_nodes=8", "cluster.options=['--clusters=other']") == 0


def test_variables_of_the_shell_do_not_change_what_is_asked(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(desk, 'echo "sbatch: Job 5 to start at 2030-01-02T03:04:05"')
    for variable in ("SLURM_CLUSTERS", "SINFO_PARTITION", "SCONTROL_ALL"):
        monkeypatch.setenv(variable, "other")
    desk.command("sinfo", f'[ -z "$SLURM_CLUSTERS$SINFO_PARTITION$SCONTROL_ALL" ] || exit 1; echo "{NODES}"')
    assert desk.type(*WORDS) == 0 and "gave no usable answer" not in desk.err


def test_a_start_in_another_form_is_not_printed(desk: Desk) -> None:
    answers(desk, 'echo "sbatch: Job 5 to start at 12/24-03:04:05"')
    assert desk.type(*WORDS) == 0 and "expects" not in desk.out


@pytest.mark.parametrize("answer", ["exec sleep 60", "exit 1", "echo 'gpu up 8 idle'", 'rm -- "$0"; exit 127'])
def test_without_an_answer_to_compare_with_sbatch_decides(
    desk: Desk, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_states, "TIMEOUT_SECONDS", 1)
    answers(desk, "exit 0")
    for name in ("scontrol", "sinfo", "sacctmgr"):
        desk.command(name, answer)
    assert desk.type(*WORDS, "trainer.num_nodes=8") == 0
    assert len(desk.runs()) == 1
    assert desk.err.startswith(
        "note: scontrol and sinfo gave no usable answer, so some limits of the cluster were not checked"
    )


@pytest.mark.parametrize(
    ("later", "text"),
    [
        (timedelta(seconds=20), "at once"),
        (timedelta(hours=2), "at 14:00"),
        (timedelta(days=2), "on 2026-01-03 at 12:00"),
    ],
)
def test_an_expected_start_in_words(later: timedelta, text: str) -> None:
    now = datetime(2026, 1, 1, 12)
    assert describe_start(now + later, now) == text
