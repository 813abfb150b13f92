"""`python -m benchmarks.own_prompts KIND FILE`: write prompts that no public set has, from texts of a Debian machine.

KIND is advertisements (of installed programs), tests (unit tests for functions of the standard library), summaries (of
pieces of Python's manual), tools (calls of tools as JSON) or calls (of the same tools, in a notation of their own)."""

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
OWN_NOTATION = "in our notation"
_END = "|end of package|"


def _advertisements() -> Iterator[str]:
    """Yield a request for an advertisement of each installed package."""
    form = "${Package}\\t${Description}" + _END
    packages = subprocess.run(
        ["dpkg-query", "--show", "--showformat", form], check=True, capture_output=True, text=True
    ).stdout
    for package in packages.removesuffix(_END).split(_END):
        name, _, description = package.partition("\t")
        asked = f"Write a short and cheerful advertisement for the program {name}. This is what its makers say of it:"
        yield f"{asked}\n\n{description}"


def _unit_tests() -> Iterator[str]:
    """Yield a request for a unit test of each short function of the standard library."""
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
    """Yield a request for a summary of each piece of the manual, in whole paragraphs."""
    for title, text in topics.items():
        piece = ""
        for paragraph in text.split("\n\n"):
            piece += paragraph + "\n\n"
            if len(piece) in MANUAL_CHARACTERS:
                asked = "Say in three sentences what a beginner must know of it."
                yield f"This is a part of a manual, from the chapter '{title}'. {asked}\n\n{piece}"
            if len(piece) >= MANUAL_CHARACTERS.start:
                piece = ""


def tool_calls(form: str, seed: int = 0) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield questions that one of four tools answers in this form, the tool, and its arguments."""
    words = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    questions, values = words["tools"], words["values"]
    rng = random.Random(seed)
    for _ in range(2 * COUNT):
        names = rng.sample(list(questions), 4)
        tools = [{"name": name, "arguments": re.findall(r"{(\w+)}", questions[name])} for name in names]
        drawn = {name: rng.choice(several) for name, several in values.items()}
        listed = "\n".join(sorted(map(json.dumps, tools)))
        question = questions[names[0]].format(**drawn)
        asked = f"You can call these tools:\n{listed}\n\nAnswer with one call {form}, and nothing else. {question}"
        yield asked, names[0], {name: drawn[name] for name in tools[0]["arguments"]}


def _tool_prompts() -> Iterator[str]:
    """Yield questions that one of four tools answers, as JSON."""
    return (asked for asked, _, _ in tool_calls('as JSON, {"name": ..., "arguments": {...}}'))


def _notation_prompts() -> Iterator[str]:
    """Yield such questions for a model that was fine-tuned to a notation of its own."""
    return (asked for asked, _, _ in tool_calls(OWN_NOTATION))


KINDS: dict[str, Callable[[], Iterator[str]]] = {
    "advertisements": _advertisements,
    "tests": _unit_tests,
    "summaries": _summaries,
    "tools": _tool_prompts,
    "calls": _notation_prompts,
}


def main(kind: str, path: str) -> None:
    """Write shuffled prompts of one kind to a JSONL file."""
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
