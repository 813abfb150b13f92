"""The ways of decoding that must all give the same text, and an order that soon has met every pair of their choices.

Plain records; knows nothing of engines.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from service.engine.requests import SamplingParams

Extras = Literal["none", "penalties", "top_p", "min_p+top_k", "stop"]
Company = Literal["alone", "among 15", "short of slots"]

NUM_COMPANIONS = 15


@dataclass(frozen=True, slots=True)
class Way:
    """Who drafts, and how many nodes a step verifies."""

    drafter: Literal["lookup", "lookup+specblock", "specblock", "random", "none"]
    nodes: int | None  # None = by cost

    def __str__(self) -> str:
        if self.drafter == "none":
            return "none"
        return f"{self.drafter}, {'cost' if self.nodes is None else self.nodes}"


@dataclass(frozen=True, slots=True)
class Case:
    """One combination."""

    temperature: float
    extras: Extras
    way: Way
    company: Company
    prefill_chunk: int

    def __str__(self) -> str:
        return (
            f"temperature {self.temperature}, extras {self.extras}, drafter {self.way}, {self.company}, "
            f"chunks of {self.prefill_chunk}"
        )


TEMPERATURES = (0.0, 0.7, 1.0, 1.5)
EXTRAS: tuple[Extras, ...] = ("none", "penalties", "top_p", "min_p+top_k", "stop")
WAYS = (Way("lookup", None), Way("lookup", 16), Way("random", 16), Way("random", 48), Way("none", 0))
TRAINED_WAYS = (Way("lookup+specblock", None), Way("lookup+specblock", 16), Way("specblock", 48))
"""Further ways where there is a trained drafter."""

COMPANIES: tuple[Company, ...] = ("alone", "among 15", "short of slots")
PREFILL_CHUNKS = (256, 17, 64)
SAMPLINGS = tuple(itertools.product(TEMPERATURES, EXTRAS))


def ordered_cases(seed: int, ways: Sequence[Way] = WAYS) -> list[Case]:
    """All cases, each once: first a few in which every pair of choices occurs, then the others shuffled."""
    choices = itertools.product(TEMPERATURES, EXTRAS, ways, COMPANIES, PREFILL_CHUNKS)
    left = [Case(*chosen) for chosen in choices]
    random.Random(seed).shuffle(left)
    ordered: list[Case] = []
    seen: set[object] = set()
    while pairs_of(best := max(left, key=lambda case: len(pairs_of(case) - seen))) - seen:
        left.remove(best)
        ordered.append(best)
        seen |= pairs_of(best)
    return ordered + left


def pairs_of(case: Case) -> set[object]:
    """Every two choices of a case, with what they are choices of."""
    choices = enumerate((case.temperature, case.extras, case.way, case.company, case.prefill_chunk))
    return set(itertools.combinations(choices, 2))


def sampling_params(
    temperature: float, extras: Extras, *, seed: int, max_tokens: int, stop: tuple[str, ...]
) -> SamplingParams:
    """The parameters behind a sampling's names. Only with extras `stop` may an answer end before its last token."""
    plain = SamplingParams(seed=seed, max_tokens=max_tokens, temperature=temperature, ignore_eos=True)
    if extras == "penalties":
        return replace(plain, repetition_penalty=1.1, presence_penalty=0.4, frequency_penalty=0.3)
    if extras == "top_p":
        return replace(plain, top_p=0.9)
    if extras == "min_p+top_k":
        return replace(plain, min_p=0.05, top_k=40)
    if extras == "stop":
        return replace(plain, stop=stop, ignore_eos=False, min_tokens=4)
    return plain
