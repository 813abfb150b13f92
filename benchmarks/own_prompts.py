"""`python -m benchmarks.own_prompts KIND FILE`: prompts of kinds that no public set has, made up or from texts that lie
on any Debian machine with Python.

`advertisements` of installed programs, unit `tests` for functions of the standard library, `summaries` of pieces of
Python's manual, 1,500 characters and more, and calls of `tools` as JSON."""

import ast
import inspect
import json
import pkgutil
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics

COUNT = 300
MANUAL_CHARACTERS = range(1500, 3001)
FUNCTION_CHARACTERS = range(200, 1201)
_END = "|end of package|"


def _advertisements() -> Iterator[str]:
    """Of each package that is installed."""
    form = "${Package}\\t${Description}" + _END
    packages = subprocess.run(
        ["dpkg-query", "--show", "--showformat", form], check=True, capture_output=True, text=True
    ).stdout
    for package in packages.removesuffix(_END).split(_END):
        name, _, description = package.partition("\t")
        asked = f"Write a short and cheerful advertisement for the program {name}. This is what its makers say of it:"
        yield f"{asked}\n\n{description}"


def _unit_tests() -> Iterator[str]:
    """Of functions of the standard library."""
    directory = Path(inspect.getfile(ast)).parent
    for module in pkgutil.iter_modules([str(directory)]):
        path = directory / f"{module.name}.py"
        if not path.exists():
            continue
        text = path.read_text(encoding="utf-8")
        for node in ast.parse(text).body:
            source = ast.get_source_segment(text, node) if isinstance(node, ast.FunctionDef) else None
            if source is not None and len(source) in FUNCTION_CHARACTERS:
                yield f"Write a unit test with pytest for this function.\n\n```python\n{source}\n```"


def _summaries() -> Iterator[str]:
    """Of pieces of the manual, whole paragraphs each."""
    for title, text in topics.items():
        piece = ""
        for paragraph in text.split("\n\n"):
            piece += paragraph + "\n\n"
            if len(piece) in MANUAL_CHARACTERS:
                asked = "Say in three sentences what a beginner must know of it."
                yield f"This is a part of a manual, from the chapter '{title}'. {asked}\n\n{piece}"
            if len(piece) >= MANUAL_CHARACTERS.start:
                piece = ""


_TOOLS = {
    "get_weather": "What will the weather be like in {city} on {day}?",
    "book_table": "Book a table for {people} in {city} on {day}.",
    "find_flights": "Which flights from {city} to {to} are there on {day}, for {people} people?",
    "add_event": "Put dinner with {name} into my calendar, {day} in {city}.",
    "send_message": "Tell {name} that we are {people} people now.",
    "convert_money": "How much is {amount} {currency} in dollars?",
    "pay_bill": "Pay {name} {amount} {currency} on {day}.",
    "track_parcel": "Where is the parcel {amount} from {city}?",
}
_VALUES = {
    "city": ("Lisbon", "Oslo", "Kyoto", "Nairobi", "Quito", "Prague", "Boston", "Hanoi"),
    "to": ("Rome", "Lima", "Cairo", "Delhi"),
    "day": ("Monday", "Tuesday", "Friday", "Sunday", "May 3", "June 21"),
    "people": ("two", "3", "four", "6", "ten"),
    "name": ("Ana", "Boris", "Chen", "Dara", "Emil", "Farah", "Greta"),
    "amount": ("15", "80", "120", "349", "1250", "7200"),
    "currency": ("euros", "yen", "pounds", "francs"),
}


def _tool_calls() -> Iterator[str]:
    """Each for one of four tools."""
    rng, form = random.Random(0), '{"name": ..., "arguments": {...}}'
    for _ in range(2 * COUNT):
        names = rng.sample(list(_TOOLS), 4)
        tools = [{"name": name, "arguments": re.findall(r"{(\w+)}", _TOOLS[name])} for name in names]
        asked = _TOOLS[names[0]].format(**{name: rng.choice(values) for name, values in _VALUES.items()})
        listed = "\n".join(sorted(map(json.dumps, tools)))
        yield f"You can call these tools:\n{listed}\n\nAnswer with one call as JSON, {form}, and nothing else. {asked}"


KINDS: dict[str, Callable[[], Iterator[str]]] = {
    "advertisements": _advertisements,
    "tests": _unit_tests,
    "summaries": _summaries,
    "tools": _tool_calls,
}


def main(kind: str, path: str) -> None:
    prompts = sorted(set(KINDS[kind]()))
    random.Random(0).shuffle(prompts)
    with Path(path).open("w", encoding="utf-8") as file:
        for number, prompt in enumerate(prompts[:COUNT]):
            messages = [{"role": "user", "content": prompt}]
            file.write(json.dumps({"id": f"{kind}-{number}", "task": kind, "messages": messages}) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in KINDS:
        sys.exit(f"{__doc__}\n\nKIND is one of {', '.join(KINDS)}.")
    main(sys.argv[1], sys.argv[2])
