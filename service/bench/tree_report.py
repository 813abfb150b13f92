"""What `adaptree tree` does: answer a prompt under observation, choose the steps to draw, print and write them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from service.assembly import Assembly, assemble
from service.bench.conditions import refuse_unwritable
from service.bench.generate import Answer, generate
from service.bench.observe import observed
from service.bench.prompts import refuse_too_long
from service.bench.records import StepRecord
from service.bench.tree_layout import lay_out
from service.bench.tree_paint import refuse_png_without_matplotlib, svg_of, write_png
from service.bench.tree_picture import Picture, answer_pieces, drawn_tree, tree_title
from service.bench.tree_text import text_of
from service.config import ServiceConfig
from service.engine.requests import GenerationRequest, SamplingParams
from service.errors import RequestError, StartupError


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, and how."""

    prompt: str
    is_raw: bool  # continue the text as it is, without the chat template
    temperature: float
    max_tokens: int
    seed: int


def run_tree(config: ServiceConfig, question: Question, *, first: int | None, count: int, out: Path | None) -> None:
    """Draw `count` trees from step `first` on; unset, from the step with the longest accepted path on."""
    refuse_unwritable(out)
    write = _writer(out)
    assembly = assemble(config)
    answer, steps = answered(assembly, question)
    picture = picture_of(assembly, answer, steps, first=first, count=count)
    Console(soft_wrap=True, highlight=False).print(text_of(picture), end="")
    write(picture)


def answered(assembly: Assembly, question: Question) -> tuple[Answer, list[StepRecord]]:
    """The answer and its steps. Raises StartupError for a prompt that cannot be read or leaves no room."""
    prompt = _tokens(assembly, question)
    refuse_too_long([prompt], question.max_tokens, assembly.limits.max_model_len, "--prompt")
    sampling = SamplingParams(
        seed=question.seed, max_tokens=question.max_tokens, temperature=question.temperature, skip_special_tokens=False
    )
    with observed(assembly, assembly.drafter_name, assembly.weights) as seen:
        engine = assembly.engine(drafter=seen.drafter)
        run = generate(engine, [GenerationRequest(request_id="prompt", prompt=prompt, sampling=sampling)])
        return run.answers[0], seen.recorder.take()


def picture_of(
    assembly: Assembly, answer: Answer, steps: Sequence[StepRecord], *, first: int | None, count: int
) -> Picture:
    """The trees of the chosen steps, and the whole answer."""

    def text(token: int) -> str:
        return assembly.tokenizer.decode([token])

    chosen = chosen_steps(steps, first=first, count=count)
    accepted = sum(step.accepted for step in steps)
    pieces = answer_pieces(steps, len(answer.token_ids), assembly.tokenizer.decode)
    return Picture(
        trees=tuple(drawn_tree(steps[n], tree_title(steps[n], n + 1, len(steps), text), text) for n in chosen),
        pieces=tuple(pieces),
        caption=(
            f"green: accepted drafts, yellow: the target's own tokens; {len(answer.token_ids)} tokens in "
            f"{len(steps)} steps, {accepted} accepted, {1 + accepted / len(steps):.2f} a step; "
            f"drafter {assembly.drafter_name}"
        ),
    )


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


def _writer(out: Path | None) -> Callable[[Picture], None]:
    """How the file is written, decided by its name before anything is loaded."""
    if out is None:
        return lambda picture: None

    def text(picture: Picture) -> None:
        out.write_text(text_of(picture).plain, encoding="utf-8")

    def svg(picture: Picture) -> None:
        out.write_text(svg_of(lay_out(picture)), encoding="utf-8")

    def png(picture: Picture) -> None:
        write_png(lay_out(picture), out)

    writers: Mapping[str, Callable[[Picture], None]] = {".txt": text, ".svg": svg, ".png": png}
    if out.suffix not in writers:
        raise StartupError(f"--out {out}: give a name that ends in {', '.join(writers)}")
    if out.suffix == ".png":
        refuse_png_without_matplotlib()
    return writers[out.suffix]


def _tokens(assembly: Assembly, question: Question) -> list[int]:
    if question.is_raw:
        return assembly.tokenizer.encode(question.prompt, add_special_tokens=True)
    try:
        return assembly.tokenizer.render_chat([{"role": "user", "content": question.prompt}])
    except RequestError as error:
        raise StartupError(f"--prompt: {error.message} Give --raw to continue the text as it is.") from error
