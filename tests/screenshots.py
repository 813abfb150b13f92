"""Takes the pictures of the live page that the documentation shows, of a server that it starts.

    python -m tests.screenshots docs/images

It asks some questions first, a few of them again, so that there is something to see.
"""

import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from service.bench.servers import one_server
from service.config import ServiceConfig
from tests.browser import Browser, browser

SIMILAR = (
    "List the months of the year, one per line.",
    "Explain what a prime number is, and give five examples.",
    "Write an email that thanks a customer for a delayed order's patience.",
    "What should one pack for a week in the mountains?",
    "Write a JSON object with three users, each with name, age and city.",
)
TIMES = 4
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


SCHEMES = ("light", "dark")


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = ServiceConfig(max_output_tokens=200)
    with TemporaryDirectory() as profile, one_server(config) as server, browser(Path(profile)) as page:
        page.resize(1280, 1060)
        page.open(server.url)
        page.until("document.querySelector('#state').className === 'ready'")
        page.value("document.getElementById('temperature').value = 0.5; document.getElementById('seed').value = 7")
        for question in QUESTIONS:
            ask(page, question)
        for question in SIMILAR * TIMES:  # not by the page, whose answers are not remembered without a key
            body = {"model": config.model, "messages": [{"role": "user", "content": question}], "temperature": 0}
            httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=_ANSWER_SECONDS).raise_for_status()
        show_a_branching_step(page)
        time.sleep(_SETTLING_SECONDS)
        for scheme in SCHEMES:
            file = picture(page, folder / f"page-{scheme}.png", scheme)
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


def picture(page: Browser, file: Path, scheme: str) -> Path:
    page.prefer(scheme)
    page.value("window.scrollTo(0, 0); document.getElementById('talk').scrollTop = 1e6")
    time.sleep(_SETTLING_SECONDS)
    page.screenshot(file)
    return file


if __name__ == "__main__":
    main(Path(sys.argv[1]))
