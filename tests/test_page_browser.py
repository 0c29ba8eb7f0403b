"""Test the page of a real run in a real browser: on phone and desktop, in light and dark mode."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Tab, browser

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="not installed: chromium (apt install chromium)"),
]

EYE = Path(__file__).with_name("eye.js").read_text(encoding="utf-8")
PHONE, DESK = 390, 1280  # pixels


@pytest.fixture(scope="module")
def tab(tmp_path_factory) -> Iterator[Tab]:
    with browser(tmp_path_factory.mktemp("chromium")) as tab:
        yield tab


@pytest.fixture(scope="module")
def page(project: Path, run: Callable, tmp_path_factory) -> Path:
    """Make the page of a short run, with samples as of a node with two GPUs."""
    run_dir = tmp_path_factory.mktemp("runs") / "digits-with-a-name-that-is-rather-long_2026-01-31_4711"
    brief = "trainer.max_epochs=3 callbacks.progress.refresh_rate=0"
    done = run(f"python train.py {brief} run_dir={run_dir}", project)
    assert done.returncode == 0, done.stdout
    sampled(run_dir)
    done = run(f"python report.py {run_dir}", project)
    assert done.returncode == 0, done.stdout
    return run_dir / "report.html"


def sampled(run_dir: Path) -> None:
    """Write one hour of samples and phases as from a GPU node."""
    attempts = [json.loads(line) for line in (run_dir / "attempts.jsonl").read_text().splitlines()]
    end = attempts[-1]["time"]
    attempts[0]["time"] = end - 3600
    (run_dir / "attempts.jsonl").write_text("".join(json.dumps(event) + "\n" for event in attempts))
    folder = run_dir / "monitor"
    folder.mkdir(exist_ok=True)
    lines = ["time,attempt,cpu_percent,memory_gb," + ",".join(
        f"gpu{gpu}_{metric}" for gpu in (0, 1) for metric in ("percent", "memory_gb", "watts", "celsius")
    )]  # fmt: skip
    for when in range(0, 3600, 10):
        busy = 5 if when % 600 < 40 else 90 + when % 70 / 10
        gpus = f"{busy},30.2,{100 + 5 * busy},60,{busy - 3},30.2,{100 + 5 * busy},61"
        lines.append(f"{end - 3600 + when},1,{40 + when % 50},80,{gpus}")
    (folder / f"{attempts[0]['hosts'][0]}.csv").write_text("\n".join(lines) + "\n")
    with (folder / "phases.jsonl").open("a") as stream:
        for begin in range(0, 3600, 600):
            for what, since, until in (("validation", 0, 35), ("checkpoint", 35, 40)):
                phase = {"what": what, "begin": end - 3600 + begin + since, "end": end - 3600 + begin + until}
                stream.write(json.dumps(phase | {"attempt": 1, "step": begin}) + "\n")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESK], ids=["phone", "desk"])
def test_nobody_would_complain(width: int, dark: bool, page: Path, tab: Tab, tmp_path: Path) -> None:
    tab.show(page.as_uri(), width, dark=dark)
    assert tab.evaluate(EYE) == []
    assert tab.requests == [page.as_uri()]
    assert (tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 20, 23)") == dark
    assert tab.evaluate("document.querySelectorAll('figure svg').length") >= 8
    tab.screenshot(tmp_path / "page.png")
    tab.evaluate("document.querySelectorAll('details').forEach((details) => (details.open = true))")
    assert tab.evaluate(EYE) == []


def test_a_wide_picture_is_narrow_on_a_phone(page: Path, tab: Tab) -> None:
    pictures = "[...document.querySelectorAll('.both svg')].filter((one) => one.getClientRects().length)"
    shown = f"{pictures}.map((one) => one.viewBox.baseVal.width)"
    tab.show(page.as_uri(), PHONE)
    assert set(tab.evaluate(shown)) == {400}
    tab.show(page.as_uri(), DESK)
    assert set(tab.evaluate(shown)) == {1120}


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("<p style='color: #999'>grey</p>", "contrast"),
        ("<p>one</p><p style='margin-top: -40px'>two</p>", "it lies over"),
        ("<p style='width: 2000px'>wide</p>", "it scrolls sideways"),
        ("<div style='width: 50px; overflow: hidden; white-space: nowrap'>longer than its box</div>", "cut off"),
        ("<svg viewBox='0 0 100 20' width='100'><text x='95' y='15'>out</text></svg>", "cut off"),
        ("<p style='font-size: 6px'>small</p>", "small"),
        ("<svg></svg>", "a picture without words"),
        ("<h1>a second one</h1>", "not one main heading"),
    ],
)
def test_the_eye_sees_what_is_wrong(body: str, complaint: str, tab: Tab, tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    good = "<!DOCTYPE html><html lang='en'><meta charset='utf-8'><title>t</title><body><h1>h</h1><p>good</p>"
    bad.write_text(good)
    tab.show(bad.as_uri(), DESK)
    assert tab.evaluate(EYE) == []
    bad.write_text(good + body)
    tab.show(bad.as_uri(), DESK)
    assert [said for said in tab.evaluate(EYE) if said.startswith(complaint)]


def test_a_request_to_anybody_is_counted(tab: Tab, tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text("<img src='http://127.0.0.1:9/x.png'>")
    tab.show(bad.as_uri(), DESK)
    assert tab.requests[1:] == ["http://127.0.0.1:9/x.png"]
