"""The draft trees of a prompt's steps: who proposed each node, what was accepted, and the answer coloured by that."""

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import matplotlib
import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.text import Text

from benchmarks.draft_records import StepRecord, TokenPath, observed
from service.assembly import Assembly
from service.bench.commands import Seed, Temperature
from service.bench.driver import Answer, generate
from service.bench.experiment import prepare
from service.config import LoadedConfig
from service.engine.requests import GenerationRequest, SamplingParams
from service.errors import RequestError, StartupError
from service.prompts import refuse_too_long

SUFFIXES = (".txt", ".svg", ".png")

Kind = Literal["plain", "accepted", "bonus", "rejected"]
Piece = tuple[str, Kind]
"""A stretch of text; bonus also stands for tokens of steps that drafted nothing: the target's own."""

_STYLES: dict[Kind, str] = {"plain": "bold", "accepted": "bold green", "bonus": "yellow", "rejected": "dim"}
_FILLS: dict[Kind, str] = {"plain": "none", "accepted": "#bbf7d0", "bonus": "#fde68a", "rejected": "#e5e7eb"}

_COLUMNS = 120  # of a drawn page
_INCHES = 0.0836, 0.2  # a character's width and a line's height, at 10 points
# XML knows no control characters, and viewers join spaces.
_PRINTABLE = {code: "\N{REPLACEMENT CHARACTER}" for code in range(32)} | {ord(" "): "\N{NO-BREAK SPACE}"}


def run(
    loaded: LoadedConfig,
    prompt: Annotated[str, typer.Option("--prompt", metavar="TEXT", help="What to answer.")],
    steps: Annotated[int, typer.Option(min=1, help="How many trees to draw, of steps one after the other.")] = 1,
    step: Annotated[
        int | None, typer.Option(min=1, help="The first step to draw. Unset: the one with the longest accepted path.")
    ] = None,
    temperature: Temperature = 0.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 64,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    seed: Seed = 0,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Also draw to a .svg, .png or .txt file.")
    ] = None,
) -> bool:
    """Draw the draft tree of a step, who proposed its nodes and what was accepted, and colour the answer."""
    if out is not None and out.suffix not in SUFFIXES:
        raise StartupError(f"--out {out}: give a name that ends in {', '.join(SUFFIXES)}")
    assembly = prepare(loaded.config, out)
    sampling = SamplingParams(seed=seed, max_tokens=max_tokens, temperature=temperature, skip_special_tokens=False)
    answer, records = answered(assembly, tokens_of(assembly, prompt, raw=raw), sampling)
    picture = picture_of(assembly, answer, records, chosen_steps(records, first=step, count=steps))
    text = Text.assemble(*((words, _STYLES[kind]) for words, kind in picture))
    Console(soft_wrap=True, highlight=False).print(text, end="")
    if out is not None and out.suffix == ".txt":
        out.write_text(text.plain, encoding="utf-8")
    elif out is not None:
        draw(picture, out)
    return True


def tokens_of(assembly: Assembly, prompt: str, *, raw: bool) -> list[int]:
    """The prompt as the target reads it. Raises StartupError."""
    if raw:
        return assembly.tokenizer.encode(prompt, add_special_tokens=True)
    try:
        return assembly.tokenizer.render_chat([{"role": "user", "content": prompt}])
    except RequestError as error:
        raise StartupError(f"--prompt: {error.message} Give --raw to continue the text as it is.") from error


def answered(assembly: Assembly, prompt: Sequence[int], sampling: SamplingParams) -> tuple[Answer, list[StepRecord]]:
    """The answer and its steps. Raises StartupError for a prompt that leaves no room."""
    refuse_too_long([prompt], sampling.max_tokens, assembly.limits.max_model_len, "--prompt")
    drafter, recorder = observed(assembly)
    request = GenerationRequest(request_id="prompt", prompt=prompt, sampling=sampling)
    return generate(assembly.engine(drafter=drafter), [request]).answers[0], recorder.take()


def chosen_steps(steps: Sequence[StepRecord], *, first: int | None, count: int) -> list[int]:
    """Numbers (from 0) of the steps to draw; only those that verified a tree. `first` counts from 1."""
    with_trees = [number for number, step in enumerate(steps) if step.verified]
    if first is None and with_trees:
        first = 1 + max(with_trees, key=lambda number: steps[number].accepted)
    chosen = [number for number in with_trees if first is not None and number + 1 >= first][:count]
    if not chosen:
        place = f"from step {first} on " if first is not None else ""
        raise StartupError(
            f"no step {place}verified a draft tree ({len(steps)} steps): drafting did not pay here; "
            "set budget_policy to fixed to verify trees all the same, or ask for more tokens"
        )
    return chosen


def picture_of(assembly: Assembly, answer: Answer, steps: Sequence[StepRecord], chosen: Sequence[int]) -> list[Piece]:
    """The trees of the chosen steps and the whole answer, as one text."""

    def text_of(token: int) -> str:
        return json.dumps(assembly.tokenizer.decode([token]), ensure_ascii=False)

    picture: list[Piece] = []
    for number in chosen:
        picture.append((f"{title_of(steps[number], number + 1, len(steps), text_of)}\n", "plain"))
        picture += [*tree_of(steps[number], text_of), ("\n", "plain")]
    accepted = sum(step.accepted for step in steps)
    caption = (
        f"green: accepted drafts, yellow: the target's own tokens; {len(answer.token_ids)} tokens in "
        f"{len(steps)} steps, {accepted} accepted, {1 + accepted / len(steps):.2f} a step; "
        f"drafter {assembly.drafter_name}"
    )
    picture += answer_pieces(steps, len(answer.token_ids), assembly.tokenizer.decode)
    return [*picture, (f"\n\n{caption}\n", "plain")]


def title_of(step: StepRecord, number: int, num_steps: int, text_of: Callable[[int], str]) -> str:
    return (
        f"step {number} of {num_steps}: {len(step.verified)} nodes verified, {step.accepted} accepted, then "
        f"{text_of(step.truth[step.accepted])} from the target"
    )


def tree_of(step: StepRecord, text_of: Callable[[int], str]) -> Iterator[Piece]:
    """A line for the root and for each verified node, children below their parent and the likeliest first."""
    yield f"{text_of(step.root)}\n", "accepted"
    yield from _below((), "", step, text_of)


def _below(parent: TokenPath, indent: str, step: StepRecord, text_of: Callable[[int], str]) -> Iterator[Piece]:
    found = [path for path in step.verified if path[:-1] == parent]
    children = sorted(found, key=lambda path: (-step.candidates[path], path))
    for path in children:
        accepted = path == step.truth[: len(path)] and len(path) <= step.accepted
        branch, further = ("└─", "   ") if path == children[-1] else ("├─", "│  ")
        words = f"{text_of(path[-1])}  {step.candidates[path]:.2f}  {' and '.join(origins_of(step, path))}"
        yield f"{indent}{branch}{'✓' if accepted else ' '} {words}\n", "accepted" if accepted else "rejected"
        yield from _below(path, indent + further, step, text_of)


def origins_of(step: StepRecord, path: TokenPath) -> list[str]:
    """Who proposed a node; where forwards said so, of these the first that did."""
    forwards = {p.source: p.forward for p in reversed(step.places) if p.node == path[:-1] and path[-1] in p.tokens}
    named = [source for source, tree in step.proposals.items() if path in tree]
    return [f"{source}, forward {forwards[source] + 1}" if source in forwards else source for source in named]


def answer_pieces(steps: Sequence[StepRecord], num_tokens: int, decode: Callable[[Sequence[int]], str]) -> list[Piece]:
    """The answer's tokens, neighbours of one kind together; a character that tokens share goes to the last of them."""
    kinds: list[tuple[int, Kind]] = [
        (token, "accepted" if place < step.accepted else "bonus")
        for step in steps
        for place, token in enumerate(step.emitted)
    ]
    pieces: list[Piece] = []
    tokens: list[int] = []
    shown = ""
    for token, kind in kinds[:num_tokens]:
        tokens.append(token)
        text = decode(tokens)
        if text.endswith("\ufffd") and len(tokens) < num_tokens:
            continue
        new, shown = text[len(shown) :], text
        before = pieces.pop()[0] if pieces and pieces[-1][1] == kind else ""
        pieces.append((before + new, kind))
    return pieces


def draw(picture: Sequence[Piece], file: Path) -> None:
    """The text as a page, each kind on its own ground."""
    figure = Figure()
    axes = figure.add_axes((0, 0, 1, 1))
    axes.axis("off")
    row = column = widest = 0
    for words, kind in picture:
        for part in cut_lines(words, column):
            if part == "\n":
                row, column = row + 1, 0
                continue
            ground = {"facecolor": _FILLS[kind], "edgecolor": "none", "pad": 1}
            shown = part.translate(_PRINTABLE)
            axes.text(column, row, shown, family="monospace", fontsize=10, va="center", parse_math=False, bbox=ground)
            column += len(part)
            widest = max(widest, column)
    axes.set_xlim(-2, widest + 2)
    axes.set_ylim(row + 1, -1)
    figure.set_size_inches((widest + 4) * _INCHES[0], (row + 2) * _INCHES[1])
    with matplotlib.rc_context({"svg.fonttype": "none"}), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a character that the font lacks is drawn as a box
        figure.savefig(file, dpi=200)


def cut_lines(text: str, column: int) -> Iterator[str]:
    """Stretches that fit on a line, and "\\n" where a new line begins."""
    for number, line in enumerate(text.split("\n")):
        if number:
            yield "\n"
            column = 0
        while line:
            if column >= _COLUMNS:
                yield "\n"
                column = 0
            part, line = line[: _COLUMNS - column], line[_COLUMNS - column :]
            column += len(part)
            yield part
