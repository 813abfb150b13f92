"""What the type of the weights does to what a model says: each against float32, token by token of the same texts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
import typer
from rich.table import Table
from torch import Tensor

from kernels.rows import ExtendRows
from service.assembly import Assembly
from service.bench.commands import Limit, Out, PromptFiles
from service.bench.driver import generate
from service.bench.experiment import Measure, conclude, counted, plain_engine, prepare, read_sets, requests_from
from service.config import LoadedConfig
from service.engine.numerics import Trial
from service.engine.target import Target

EXACT, TYPES = "float32", ("bfloat16", "int8", "auto")


@dataclass(frozen=True, slots=True)
class TypeRow:
    """One type on one set: means over the tokens of answers that float32 gives."""

    set: str
    dtype: str
    tokens: int
    agreement: float  # share of positions whose likeliest token is the one of float32
    perplexity: float
    exact_perplexity: float  # of float32
    divergence: float  # KL(float32 || this type), nats per token


@torch.inference_mode()
def log_probabilities(target: Target, text: Sequence[int], first: int) -> Tensor:
    """Of the tokens behind each position from `first` on. # -> [positions, vocab]"""
    trial = Trial(target, sequences=1, max_length=len(text))
    rows = trial.place([ExtendRows(0, 0, text, completes=True)])
    wanted = replace(rows, logit_rows=torch.arange(first, len(text)))
    return target.forward(wanted, trial.table).logits.float().log_softmax(-1)


def compare(
    assemblies: dict[str, Assembly], name: str, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[TypeRow]:
    """Rows of all types on one set."""
    engine = plain_engine(assemblies[EXACT])
    found = {dtype: list[tuple[Tensor, Tensor, Tensor, Tensor]]() for dtype in TYPES}
    with counted(len(prompts), name) as advance:
        for number, prompt in enumerate(prompts):
            measure = Measure(temperature=0.0, max_tokens=max_tokens, concurrency=1, seed=0)
            answer = generate(engine, requests_from(prompts, number, measure)).answers[0].token_ids
            text, first = [*prompt, *answer[:-1]], len(prompt) - 1
            said = torch.tensor(answer)[:, None]
            exact = log_probabilities(assemblies[EXACT].target, text, first)
            for dtype in TYPES:
                other = log_probabilities(assemblies[dtype].target, text, first)
                agrees = exact.argmax(-1) == other.argmax(-1)
                divergence = (exact.exp() * (exact - other)).sum(-1)
                found[dtype].append((agrees, other.gather(1, said), exact.gather(1, said), divergence))
            advance(1)
    return [_row(name, dtype, found[dtype]) for dtype in TYPES]


def _row(name: str, dtype: str, found: Sequence[tuple[Tensor, ...]]) -> TypeRow:
    agrees, said, exact, divergence = (torch.cat(part).double() for part in zip(*found, strict=True))
    perplexity, exact_perplexity = (float((-logprobs.mean()).exp()) for logprobs in (said, exact))
    return TypeRow(
        name, dtype, len(agrees), float(agrees.mean()), perplexity, exact_perplexity, float(divergence.mean())
    )


def run(
    loaded: LoadedConfig,
    prompts: PromptFiles,
    limit: Limit = 10,
    max_tokens: Annotated[int, typer.Option(min=2, help="Length of each answer.")] = 64,
    out: Out = None,
) -> bool:
    """What bfloat16, int8 and the blocks of a GGUF file change in what the model says, against float32."""
    settings = {"budget_policy": "fixed", "drafter": "none"}
    assemblies = {
        dtype: prepare(loaded.config.model_copy(update={**settings, "load_dtype": dtype}), out)
        for dtype in (EXACT, *TYPES)
    }
    sets = read_sets(assemblies[EXACT], prompts, limit, max_tokens)
    rows = [row for each in sets for row in compare(assemblies, each.name, each.prompts, max_tokens)]
    table = Table("set", "weights", "tokens", "agreement", "perplexity", "of float32", "KL, nats")
    for row in rows:
        figures = (
            f"{row.agreement:.3%}",
            f"{row.perplexity:.4f}",
            f"{row.exact_perplexity:.4f}",
            f"{row.divergence:.5f}",
        )
        table.add_row(row.set, row.dtype, f"{row.tokens}", *figures)
    means = {
        dtype: sum(row.agreement * row.tokens for row in rows if row.dtype == dtype)
        / sum(row.tokens for row in rows if row.dtype == dtype)
        for dtype in TYPES
    }
    return conclude(assemblies[EXACT], out, rows, {"agreement": means}, table)
