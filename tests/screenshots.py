"""Takes the picture of the live page that the documentation shows, from a server that runs.

    python -m tests.screenshots http://127.0.0.1:8000 docs/images

It asks a few questions first, so that there is something to see.
"""

import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.browser import Browser, browser

QUESTIONS = (
    "List the planets of the solar system in order, one per line.",
    "Write a Python function that returns the sum of a list, and one that returns its mean.",
    "Write one paragraph about why the Moon always shows us the same side.",
)
ENTER = 13
_ANSWER_SECONDS = 300
_SETTLING_SECONDS = 3
_FEWEST_BRANCHES = 4
_SLIDER = "document.getElementById('step')"


PICTURE = "page-light.png"


def main(url: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as profile, browser(Path(profile)) as page:
        page.resize(1280, 1060)
        page.open(url)
        page.until("document.querySelector('#state').className === 'ready'")
        page.value("document.getElementById('temperature').value = 0.5; document.getElementById('seed').value = 7")
        for question in QUESTIONS:
            ask(page, question)
        show_a_branching_step(page)
        time.sleep(_SETTLING_SECONDS)
        file = picture(page, folder)
        print(f"{file}: {file.stat().st_size:,} bytes")


def ask(page: Browser, question: str) -> None:
    page.click("#prompt")
    page.type(question)
    page.press("Enter", ENTER, "\r")
    page.until("document.getElementById('talk').getAttribute('aria-busy') === 'false'", _ANSWER_SECONDS)


def show_a_branching_step(page: Browser) -> None:
    """Of the steps whose trees had branches, the one that accepted most."""
    page.value("document.activeElement.blur()")
    steps = range(1, int(page.value("Number(document.getElementById('step').max)")) + 1)
    show(page, max(steps, key=lambda step: worth(page, step)))


def show(page: Browser, step: int) -> None:
    page.value(f"(slider => {{ slider.value = {step}; slider.dispatchEvent(new Event('input')); }})({_SLIDER})")


def worth(page: Browser, step: int) -> int:
    show(page, step)
    accepted, rejected = (
        page.value(f"document.querySelectorAll('#tree-picture .node.{kind}').length")
        for kind in ("accepted", "rejected")
    )
    return int(accepted) if rejected >= _FEWEST_BRANCHES else -1


def picture(page: Browser, folder: Path) -> Path:
    page.prefer("light")
    page.value("window.scrollTo(0, 0); document.getElementById('talk').scrollTop = 1e6")
    time.sleep(_SETTLING_SECONDS)
    page.screenshot(folder / PICTURE)
    return folder / PICTURE


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
