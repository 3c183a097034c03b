"""Take the pictures of the dashboard and of a comparison that the pages show: python docs/dashboard_picture.py.

Needs chromium. The runs are simulated, so that they are the same each time; on the dashboard, one worker is slow, and
one is killed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "pictures"
FAULTS = "0.9 kill worker 1\n"
COMMAND = (
    *("train", "digits", "stale_sync", "--workers", "6", "--servers", "2", "--epochs", "12", "--runtime", "sim"),
    *("--eval-every", "0.05", "compute.slow_workers=4", "compute.slow_factor=3"),
)
COMPARE = (
    *("compare", "digits", "downpour", "sync", "soft_sync", "single", "--target", "accuracy=0.93", "--seeds", "3"),
    *("--runtime", "sim", "--epochs", "6"),
)


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from rainband.views.dashboard.saved import SavedPage
    from tests.browser.driver import Browser

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "faults").write_text(FAULTS)
        rainband = [sys.executable, "-c", "from rainband.cli.main import main; main()"]
        options = ["--runs", str(folder / "runs"), "--faults", str(folder / "faults")]
        subprocess.run([*rainband, *COMMAND, *options], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        out = folder / "comparison"
        subprocess.run([*rainband, *COMPARE, "--out", str(out)], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        (run,) = (folder / "runs").iterdir()
        SavedPage(run).save(folder / "page.html")
        browser = Browser(folder / "profile")
        try:
            browser.resize(1280, 800)
            browser.prefer("light")
            browser.open(f"file://{folder / 'page.html'}")
            browser.run("document.querySelector('#fill').style.transition = 'none'")
            browser.until("return document.documentElement.dataset.drawn")
            browser.screenshot(PICTURES / "dashboard_light.png")
            browser.open(f"file://{out / 'report.html'}")
            browser.screenshot(PICTURES / "comparison.png")
        finally:
            browser.close()


if __name__ == "__main__":
    main()
