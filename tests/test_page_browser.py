"""Test the page of a real run in a real browser: on phone and desktop, in light and dark mode."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Tab, browser
from PIL import Image
from slurm_project import wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="not installed: chromium (apt install chromium)"),
]

EYE = Path(__file__).with_name("eye.js").read_text(encoding="utf-8")
PHONE, DESK = 400, 1280  # pixels


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
    names = [f"gpu{gpu}_{metric}" for gpu in (0, 1) for metric in ("percent", "memory_gb", "watts", "celsius")]
    lines = []
    for when in range(0, 3600, 10):
        busy = 5 if when % 600 < 40 else 90 + when % 70 / 10
        gpus = [busy, 30.2, 100 + 5 * busy, 60, busy - 3, 30.2, 100 + 5 * busy, 61]
        sample = {"time": end - 3600 + when, "attempt": 1, "cpu_percent": 40 + when % 50, "memory_gb": 80}
        lines.append(json.dumps(sample | dict(zip(names, gpus, strict=True))))
    (folder / f"node-{attempts[0]['hosts'][0]}.jsonl").write_text("\n".join(lines) + "\n")
    with (folder / "phases.jsonl").open("a") as stream:
        for begin in range(0, 3600, 600):
            for what, since, until in (("validation", 0, 35), ("checkpoint", 35, 40)):
                phase = {"what": what, "begin": end - 3600 + begin + since, "end": end - 3600 + begin + until}
                stream.write(json.dumps(phase | {"attempt": 1, "step": begin}) + "\n")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESK], ids=["phone", "desk"])
def test_nobody_would_complain(width: int, dark: bool, page: Path, tab: Tab) -> None:
    tab.show(page.as_uri(), width, dark=dark)
    num_figures = tab.evaluate("document.querySelectorAll('figure').length")
    assert num_figures >= 8
    assert tab.evaluate("document.querySelectorAll('figure .scatterlayer').length") >= num_figures
    assert tab.evaluate(EYE) == []
    assert (tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 20, 23)") == dark
    tab.evaluate("document.querySelectorAll('details').forEach((details) => (details.open = true))")
    assert tab.evaluate(EYE) == []
    assert tab.requests == [page.as_uri()]
    assert tab.complaints == []


def test_the_charts_follow_the_colour_scheme_while_the_page_is_open(page: Path, tab: Tab) -> None:
    colours = "[...document.querySelectorAll('figure .bg')].map((one) => getComputedStyle(one).fill)"
    line = "getComputedStyle(document.querySelector('.scatterlayer .js-line')).stroke"
    tab.show(page.as_uri(), DESK)
    assert set(tab.evaluate(colours)) == {"rgb(255, 255, 255)"} and tab.evaluate(line) == "rgb(0, 114, 178)"
    tab.prefer(dark=True)
    tab.wait(f"{colours}.every((one) => one === 'rgb(27, 30, 35)')")
    assert tab.evaluate(line) == "rgb(90, 180, 236)"
    assert tab.evaluate(EYE) == [] and tab.complaints == []
    tab.prefer(dark=False)


def test_one_can_zoom_and_read_values_and_save_a_picture(page: Path, tab: Tab, tmp_path: Path) -> None:
    tab.show(page.as_uri(), DESK)
    plot = "document.querySelector('figure > div')"
    place = tab.evaluate(f"(({{x, y, width, height}}) => ({{x, y, width, height}}))({plot}"
                         ".querySelector('.nsewdrag').getBoundingClientRect())")  # fmt: skip
    middle, y = place["x"] + place["width"] / 2, place["y"] + place["height"] / 2
    tab.mouse("mouseMoved", middle, y)
    tab.wait(f"{plot}.querySelector('.hoverlayer').textContent.includes('loss')")
    everything = tab.evaluate(f"{plot}.layout.xaxis.range")
    for action, x in (("mousePressed", middle), ("mouseMoved", middle + 40), ("mouseReleased", middle + 80)):
        tab.mouse(action, x, y)
    tab.wait(f"{plot}.layout.xaxis.range[1] - {plot}.layout.xaxis.range[0] < {0.5 * (everything[1] - everything[0])}")
    low, high = tab.evaluate(f"{plot}.layout.xaxis.range")
    tab.prefer(dark=True)
    tab.wait(f"getComputedStyle({plot}.querySelector('.bg')).fill === 'rgb(27, 30, 35)'")
    assert tab.evaluate(f"{plot}.layout.xaxis.range") == [low, high], "it stays where the reader has zoomed"
    tab.prefer(dark=False)
    tab.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    tab.evaluate(f"{plot}.querySelector('.modebar-btn').click()")
    wait_for(lambda: list(tmp_path.glob("*.png")), 60, "a picture")
    (picture,) = tmp_path.iterdir()
    with Image.open(picture) as image:
        assert picture.name == "loss.png" and min(image.size) > 500
    assert tab.complaints == []


def test_a_finger_on_a_chart_moves_the_page(page: Path, tab: Tab) -> None:
    tab.show(page.as_uri(), PHONE)
    chart = "document.querySelector('.wide figure .nsewdrag')"
    tab.evaluate(f"{chart}.scrollIntoView({{block: 'center'}}), 0")
    before, y = tab.evaluate("scrollY"), tab.evaluate(f"{chart}.getBoundingClientRect().y") + 150
    for kind, up in (("touchStart", 0), *(("touchMove", way) for way in range(20, 140, 20)), ("touchEnd", 0)):
        points = [{"x": 200, "y": y - up}] if kind != "touchEnd" else []
        tab.call("Input.dispatchTouchEvent", type=kind, touchPoints=points)
    tab.wait(f"scrollY > {before + 50}")
    buttons = "[...document.querySelectorAll('figure:first-of-type .modebar-btn')].map((one) => one.dataset.title)"
    assert {"Zoom in", "Zoom out", "Reset axes"} <= set(tab.evaluate(buttons)), "as a finger cannot draw a box"


def test_without_scripts_a_chart_is_told_in_words(page: Path, tab: Tab) -> None:
    tab.call("Emulation.setScriptExecutionDisabled", value=True)
    tab.show(page.as_uri(), PHONE)
    tab.call("Emulation.setScriptExecutionDisabled", value=False)
    words = tab.evaluate("document.querySelector('figure > div').innerText")
    assert words.startswith("loss: ") and "step/loss from" in words


def test_only_the_page_s_own_scripts_are_executed(page: Path, tab: Tab, tmp_path: Path) -> None:
    text = page.read_text()
    (tmp_path / "more.html").write_text(text.replace("</main>", "</main><script>window.evil = 3</script>"))
    tab.show((tmp_path / "more.html").as_uri(), DESK)
    assert tab.evaluate("window.evil") is None
    assert "script-src" in tab.complaints[0]


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
