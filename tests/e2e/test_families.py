"""The drafter that begins from traffic works for each family, and changes none of its texts: not with full trees, nor
with cached beginnings or preemptions."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from service.assembly import Assembly, assemble
from service.bench.driver import generate
from service.engine.requests import GenerationRequest, SamplingParams
from tests.conformance.checkpoints import Checkpoint, made, save
from tests.conformance.measures import small
from tests.service.bench.parts import settings_for
from tests.tiny_models import random_prompts

QUICK = ("Gemma 4, per-layer embeddings", "gpt-oss", "GLM-4.5, Air", "Ministral 3", "LFM2", "Qwen3.5")
"""Families whose layers differ most: in heads and windows, sinks, experts, positions, states."""
TOKENS = 24


def chosen() -> list[object]:
    slow = pytest.mark.slow("two seconds a family", covers="service/engine kernels tests/conformance")
    return [pytest.param(one, marks=() if str(one) in QUICK else slow, id=str(one)) for one in small()]


def answers(assembly: Assembly, drafter: str, prompts: Sequence[Sequence[int]]) -> list[list[tuple[int, ...]]]:
    """Answer the prompts, alternately at temperature 0 and 1; then the same and longer ones, from cached beginnings."""
    assert assembly.weights is not None
    weights = replace(assembly.weights, ready=lambda: True)
    engine = assembly.engine(assembly.drafter(drafter, weights=weights))

    def preempt(step: int) -> None:
        running = engine.scheduler.running
        if drafter != "none" and step % 5 == 4 and len(running) > 1:
            engine.scheduler.preempt(running[-1])

    def ask(texts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
        requests = [
            GenerationRequest(
                request_id=str(index),
                prompt=tuple(text),
                sampling=SamplingParams(seed=index, max_tokens=TOKENS, temperature=index % 2, ignore_eos=True),
                prediction=tuple(text[-TOKENS:]) if drafter != "none" else (),
            )
            for index, text in enumerate(texts)
        ]
        return [answer.token_ids for answer in generate(engine, requests, before_step=preempt).answers]

    first = ask(prompts)
    longer = [[*prompt, *answer, 5, 6] for prompt, answer in zip(prompts, first, strict=True)]
    return [first, ask(prompts), ask(longer)]


@pytest.mark.parametrize("checkpoint", chosen())
def test_a_drafter_from_traffic_changes_no_text(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = save(made(checkpoint), tmp_path, within=checkpoint.within)
    settings = settings_for(folder)
    learning = settings.adaptation.model_copy(update={"enabled": True})
    changes = {"budget_policy": "fixed", "max_budget": 16, "adaptation": learning}
    assembly = assemble(settings.model_copy(update=changes))
    assert assembly.loaded.initial_drafter is not None
    prompts = [prompt for length in (100, 30, 75, 8) for prompt in random_prompts(1, length, seed=length)]
    plain = answers(assembly, "none", prompts)
    assert plain[0] == plain[1]
    for drafter in ("memory", "specblock", "memory+specblock"):
        assert answers(assembly, drafter, prompts) == plain, drafter
