"""Draw the README's pictures of a report: python docs/report_pictures.py PROJECT. Needs Chromium.

The newest run in the project's runs/ is shown, for desk and phone, light and dark.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from browser import Tab, browser

DOCS = Path(__file__).resolve().parent
SIZES = {"desk": (1180, 1240), "phone": (400, 1240)}  # pixels from the top of the page
NUM_COLOURS = 128  # so few make a small file
# Where the machine that draws keeps the project is nothing to show.
WITHOUT_MACHINE = (
    "for (const fact of document.querySelectorAll('dd')) fact.textContent = fact.textContent.replace(%s, '~')"
)


def main() -> None:
    project = Path(sys.argv[1]).resolve()
    run_dir = max(path.parent for path in project.glob("runs/*/verdict"))  # their names begin with the time
    subprocess.run([sys.executable, "report.py", run_dir], cwd=project, check=True, stdout=subprocess.DEVNULL)
    with tempfile.TemporaryDirectory() as profile, browser(Path(profile)) as tab:
        for device, (width, height) in SIZES.items():
            for scheme in ("light", "dark"):
                tab.show((run_dir / "report.html").as_uri(), width, height=height, dark=scheme == "dark")
                tab.evaluate(WITHOUT_MACHINE % json.dumps(str(project.parent)))
                draw(tab, DOCS / f"report-{device}-{scheme}.png", height)


def draw(tab: Tab, file: Path, height: int) -> None:
    tab.screenshot(file)
    with Image.open(file) as image:
        top = image.convert("RGB").crop((0, 0, image.width, height))
    top.quantize(NUM_COLOURS, dither=Image.Dither.NONE).save(file, optimize=True)


if __name__ == "__main__":
    main()
