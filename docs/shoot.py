"""Shoot the picture of the report, light and dark: ``python docs/shoot.py``; needs chromium."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from ekfac.cli import main as cli

ROOT = Path(__file__).resolve().parents[1]
RUNS = [str(ROOT / "results" / "mnist" / part) for part in ("finals", "seeds")]


def main() -> None:
    """Write the report of the recorded auto-encoder, and shoot its first screen."""
    chromium = shutil.which("chromium") or shutil.which("chrome")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page = Path(folder) / "report.html"
        if cli.run(["report", *RUNS, "--out", str(page)]) != 0:
            raise SystemExit("the report could not be written")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for scheme, suffix in (("light", ""), ("dark", "-dark")):
            context = browser.new_context(viewport={"width": 1000, "height": 840}, color_scheme=scheme)
            shot = context.new_page()
            shot.goto(page.as_uri())
            shot.wait_for_timeout(500)
            shot.screenshot(path=ROOT / "docs" / "images" / f"report{suffix}.png")
        browser.close()


if __name__ == "__main__":
    main()
