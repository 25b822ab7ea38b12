"""Screenshots of a report in headless Chromium, light and dark, wide and narrow: scripts/screenshots.py PAGE [DIR].

`python scripts/screenshots.py runs/demo/report.html docs` writes docs/report-{light,dark}-{wide,narrow}.png.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

WIDTHS = {"wide": (1180, 2600), "narrow": (500, 3400)}  # Chromium's window cannot be narrower than 500
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def browser() -> str:
    """The browser's path, or an error that says what to install."""
    for name in BROWSERS:
        if path := shutil.which(name):
            return path
    raise SystemExit("screenshots: there is no Chromium\n  Install it: apt-get install chromium")


def shoot(page: Path, picture: Path, size: tuple[int, int], *, dark: bool) -> None:
    """One picture. The time budget is the page's own clock, so that the charts are drawn when it is taken."""
    with tempfile.TemporaryDirectory() as profile:
        command = [
            browser(), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}",
            "--virtual-time-budget=10000", f"--window-size={size[0]},{size[1]}", f"--screenshot={picture}",
            *(["--blink-settings=preferredColorScheme=0"] if dark else ["--blink-settings=preferredColorScheme=1"]),
            page.resolve().as_uri(),
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    shrink(picture)


def shrink(picture: Path) -> None:
    """A palette of 256 colours that keeps the rare ones, such as the red of waiting: a third of the bytes."""
    from PIL import Image

    image = Image.open(picture).convert("RGB")
    image.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(picture, optimize=True)


def main() -> None:
    """Four pictures."""
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    page, directory = Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else "docs")
    directory.mkdir(parents=True, exist_ok=True)
    for name, size in WIDTHS.items():
        for dark in (False, True):
            picture = directory / f"report-{'dark' if dark else 'light'}-{name}.png"
            shoot(page, picture, size, dark=dark)
            print(f"{picture}: {picture.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
