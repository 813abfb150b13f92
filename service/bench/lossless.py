"""`adaptree check lossless`: every way of decoding against plain decoding, token by token.

Plain decoding means: no drafter, one sequence at a time, nobody beside it.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from drafters.protocol import Drafter
from drafters.random_tree import RandomTreeDrafter
from drafters.registry import NoDrafter
from drafters.tree import MAX_NODES
from service.assembly import Assembly, assemble
from service.bench.conditions import conditions_of, refuse_unwritable, write_report
from service.bench.driver import Answer, generate
from service.bench.experiment import count_mismatches
from service.config import ServiceConfig
from service.engine import build
from service.engine.budget import BudgetPolicy, FixedBudget
from service.engine.build import EngineLimits
from service.engine.costs.measuring import measure_costs
from service.engine.costs.model import FREE, Costs
from service.engine.engine import Engine
from service.engine.requests import GenerationRequest, SamplingParams
from service.logging import counting
from service.prompts import read_prompt_set, refuse_too_long
from service.tokenizer import ChatTokenizer

Extras = Literal["none", "penalties", "top_p", "min_p+top_k", "stop"]
Company = Literal["alone", "among 15", "short of slots"]

NUM_COMPANIONS = 15
BUILT_IN = Path(__file__).with_name("lossless_prompts.jsonl")
"""Short and long prompts, code, lists, stories, sums, other languages, and texts that repeat themselves."""


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


_HIT_RATE = 0.8
_CASES_PER_ROUND = 192  # the next round asks other questions
_WRONG_EVERY = 7  # tokens of a prediction
_SLOT_SHARE = 0.6  # of what all sequences together would fill, where slots are scarce
_PREEMPT_EVERY = 6  # steps, where slots are scarce
_STOP_LENGTH = 3  # characters, so that it mostly spans tokens


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and how to sample its answer: what the answer is a function of."""

    prompt: int  # index
    temperature: float
    extras: Extras
    seed: int


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One answer that is not what plain decoding gave."""

    case: Case
    question: Question
    expected: Answer
    got: Answer

    @property
    def position(self) -> int:
        """The first token of the answer that differs."""
        pairs = zip(self.expected.token_ids, self.got.token_ids, strict=False)
        shorter = min(len(self.expected.token_ids), len(self.got.token_ids))
        return next((place for place, (a, b) in enumerate(pairs) if a != b), shorter)


@dataclass(frozen=True, slots=True)
class CaseResult:
    """What became of one case."""

    case: Case
    answers: int
    tokens_compared: int
    mismatched_tokens: int
    accepted_tokens: int
    preemptions: int
    first: Mismatch | None


@dataclass(frozen=True, slots=True)
class LosslessResult:
    """All cases of one check."""

    cases: tuple[CaseResult, ...]

    @property
    def tokens_compared(self) -> int:
        return sum(result.tokens_compared for result in self.cases)

    @property
    def mismatched_tokens(self) -> int:
        return sum(result.mismatched_tokens for result in self.cases)

    @property
    def preemptions(self) -> int:
        return sum(result.preemptions for result in self.cases)

    @property
    def first(self) -> Mismatch | None:
        return next((result.first for result in self.cases if result.first), None)

    @property
    def shortages(self) -> int:
        """Cases in which slots were made scarce."""
        return sum(result.case.company == "short of slots" for result in self.cases)

    @property
    def holds(self) -> bool:
        """No token differs; and a shortage that never came would have proved nothing."""
        return not self.mismatched_tokens and not (self.shortages and not self.preemptions)


def check(
    assembly: Assembly,
    prompts: Sequence[Sequence[int]],
    *,
    num_tokens: int,
    seed: int = 0,
    answer_tokens: int = 64,
    cases: Sequence[Case] = (),
    observe: Callable[[CaseResult], None] = lambda result: None,
) -> LosslessResult:
    """Go through the cases (all there are, if none are given), over and over, until so many tokens have been compared.

    `observe` hears of each case at its end.
    """
    refuse_too_long(prompts, answer_tokens, assembly.limits.max_model_len, "the lossless check")
    bench = _Bench(assembly, prompts, answer_tokens=answer_tokens, seed=seed)
    results: list[CaseResult] = []
    compared = 0
    for number, case in enumerate(_endless(cases or ordered_cases(seed, ways_of(assembly)))):
        if compared >= num_tokens:
            return LosslessResult(tuple(results))
        results.append(bench.run(case, number))
        observe(results[-1])
        compared += results[-1].tokens_compared
    raise AssertionError("the cases never end")


def ways_of(assembly: Assembly) -> tuple[Way, ...]:
    """Every way this assembly can decode in."""
    return WAYS if assembly.weights is None else WAYS + TRAINED_WAYS


def _endless(cases: Sequence[Case]) -> Iterator[Case]:
    while True:
        yield from cases


class _Bench:
    """Runs cases; remembers plain answers, which serve every case that asks the same question."""

    def __init__(self, assembly: Assembly, prompts: Sequence[Sequence[int]], *, answer_tokens: int, seed: int) -> None:
        self._assembly = assembly
        self._prompts = prompts
        self._answer_tokens = answer_tokens
        self._seed = seed
        self._costs = assembly.costs or _verify_costs(assembly)
        self._plain = assembly.engine(drafter=NoDrafter(), policy=FixedBudget(0))
        self._references: dict[Question, Answer] = {}

    def run(self, case: Case, number: int) -> CaseResult:
        """Answer the case's questions in the case's way and compare."""
        questions = self._questions(case, number)
        expected = [self._reference(question) for question in questions]
        requests = [self._request(question, name, case.way) for name, question in enumerate(questions)]
        limits = self._limits(case, questions)
        engine = _engine(self._assembly, case.way, limits, self._costs, seed=self._seed + number)
        disturb = _preempting(engine) if case.company == "short of slots" else _undisturbed
        run = generate(engine, requests, before_step=disturb)
        engine.assert_conserved()
        compared = [
            (_count(want, got), Mismatch(case, question, want, got))
            for question, want, got in zip(questions, expected, run.answers, strict=True)
        ]
        return CaseResult(
            case=case,
            answers=len(compared),
            tokens_compared=sum(len(answer.token_ids) for answer in expected),
            mismatched_tokens=sum(count for count, _ in compared),
            accepted_tokens=sum(sum(answer.accepted_per_step) for answer in run.answers),
            preemptions=sum(step.stats.preemptions for step in run.steps),
            first=next((mismatch for count, mismatch in compared if count), None),
        )

    def _questions(self, case: Case, number: int) -> list[Question]:
        """The case's own question first, then those of its company, which sample in all kinds of ways.

        Cases of a round ask few different questions, because every plain answer costs as much as many comparisons.
        """
        turn = number // _CASES_PER_ROUND
        kind = SAMPLINGS.index((case.temperature, case.extras))
        own = (kind + turn) % len(self._prompts)
        questions = [Question(own, case.temperature, case.extras, self._seed + turn)]
        if case.company == "alone":
            return questions
        others = [(own + offset) % len(self._prompts) for offset in range(1, NUM_COMPANIONS + 1)]
        kinds = [SAMPLINGS[(prompt * 7 + turn) % len(SAMPLINGS)] for prompt in others]
        return questions + [
            Question(prompt, *kind, self._seed + turn) for prompt, kind in zip(others, kinds, strict=True)
        ]

    def _reference(self, question: Question) -> Answer:
        if question not in self._references:
            (answer,) = generate(self._plain, [self._request(question, 0)]).answers
            self._references[question] = answer
        return self._references[question]

    def _request(self, question: Question, name: int, way: Way | None = None) -> GenerationRequest:
        """The question as a request, predicted where the budget is fixed, so that much is drafted and accepted."""
        predicted = way is not None and way.nodes
        return GenerationRequest(
            request_id=str(name),
            prompt=self._prompts[question.prompt],
            sampling=sampling_params(
                question.temperature,
                question.extras,
                seed=question.seed,
                max_tokens=self._answer_tokens,
                stop=self._stop(question),
            ),
            prediction=_predict(self._reference(question).token_ids, self._assembly) if predicted else (),
        )

    def _stop(self, question: Question) -> tuple[str, ...]:
        """A piece of what the answer would be if nothing stopped it."""
        if question.extras != "stop":
            return ()
        text = self._reference(replace(question, extras="none")).text
        start = 2 * len(text) // 3
        return (text[start : start + _STOP_LENGTH],) if text else ()

    def _limits(self, case: Case, questions: Sequence[Question]) -> EngineLimits:
        """The configured limits, changed in what the case is about."""
        limits = self._assembly.limits
        return replace(
            limits,
            prefill_chunk=case.prefill_chunk,
            max_budget=limits.max_budget if case.way.nodes is None else case.way.nodes,
            max_sequences=max(limits.max_sequences, NUM_COMPANIONS + 1),
            num_slots=self._too_few_slots(questions) if case.company == "short of slots" else None,
        )

    def _too_few_slots(self, questions: Sequence[Question]) -> int:
        """Room for any one sequence with a full tree, as a server must have, but not for all."""
        lengths = [len(self._prompts[question.prompt]) + self._answer_tokens for question in questions]
        return max(max(lengths) + MAX_NODES + 1, int(_SLOT_SHARE * sum(lengths)))


def _verify_costs(assembly: Assembly) -> Costs:
    limits = assembly.limits
    table = measure_costs(
        assembly.target,
        max_sequences=limits.max_sequences,
        max_model_len=limits.max_model_len,
        max_budget=limits.max_budget,
    )
    return Costs(table, FREE)


def _engine(assembly: Assembly, way: Way, limits: EngineLimits, costs: Costs, *, seed: int) -> Engine:
    """An engine that decodes in this way. A seed that drafts random trees changes with each case."""
    policy: BudgetPolicy = build.make_policy(costs if way.nodes is None else None, limits)
    return assembly.engine(drafter=_drafter(assembly, way, limits, seed), policy=policy, limits=limits)


def _drafter(assembly: Assembly, way: Way, limits: EngineLimits, seed: int) -> Drafter:
    if way.drafter != "random":
        return assembly.drafter(way.drafter, limits)
    return RandomTreeDrafter(build.drafting_sizes(assembly.target, limits), seed=seed, hit_rate=_HIT_RATE)


def _preempting(engine: Engine) -> Callable[[int], None]:
    """Preempts now and then, also when answers end so soon that slots suffice."""

    def preempt(step: int) -> None:
        running = engine.scheduler.running
        if step % _PREEMPT_EVERY == _PREEMPT_EVERY - 1 and len(running) > 1:
            engine.scheduler.preempt(running[-1])

    return preempt


def _undisturbed(step: int) -> None:
    """Nothing happens between steps."""


def _predict(answer: Sequence[int], assembly: Assembly) -> list[int]:
    """The answer with a wrong token here and there, so that some of what is drafted is rejected."""
    size = assembly.target.vocab_size
    return [(token + (place % _WRONG_EVERY == 3)) % size for place, token in enumerate(answer)]


def _count(expected: Answer, got: Answer) -> int:
    """Tokens that differ; an answer with the right tokens but another text or end counts as one."""
    tokens = count_mismatches(expected.token_ids, got.token_ids)
    return tokens or int((expected.text, expected.finish_reason) != (got.text, got.finish_reason))


_CHOICES: tuple[tuple[str, Sequence[object], Callable[[Case], object]], ...] = (
    ("temperature", TEMPERATURES, lambda case: case.temperature),
    ("sampling", EXTRAS, lambda case: case.extras),
    ("drafter, nodes", WAYS + TRAINED_WAYS, lambda case: case.way),
    ("company", COMPANIES, lambda case: case.company),
    ("prompt chunks", PREFILL_CHUNKS, lambda case: case.prefill_chunk),
)


def run_lossless(config: ServiceConfig, file: Path | None, *, num_tokens: int, seed: int, out: Path | None) -> bool:
    """Check and report; whether every token was the same."""
    refuse_unwritable(out)
    assembly = assemble(config)
    prompts = (
        built_in_prompts(assembly.tokenizer) if file is None else read_prompt_set(file, assembly.tokenizer).prompts
    )
    result = _checked(assembly, prompts, num_tokens, seed)
    console = Console()
    console.print(_table(result.cases))
    console.print(_verdict(result, assembly), markup=False, highlight=False)
    write_report(out, conditions_of(assembly), [_row(case) for case in result.cases], _summary(result, assembly))
    return result.holds


def built_in_prompts(tokenizer: ChatTokenizer) -> list[list[int]]:
    return [list(prompt) for prompt in read_prompt_set(BUILT_IN, tokenizer).prompts]


def _checked(assembly: Assembly, prompts: Sequence[Sequence[int]], num_tokens: int, seed: int) -> LosslessResult:
    with counting() as progress:
        task = progress.add_task("tokens compared", total=num_tokens)

        def advance(result: CaseResult) -> None:
            progress.advance(task, result.tokens_compared)

        return check(assembly, prompts, num_tokens=num_tokens, seed=seed, observe=advance)


def _table(results: Sequence[CaseResult]) -> Table:
    """One line per choice: every case counts once in each section."""
    table = Table("", "choice", "cases", "tokens compared", "accepted", "preemptions", "mismatched")
    for title, values, choice in _CHOICES:
        for value in values:
            mine = [result for result in results if choice(result.case) == value]
            table.add_row(title, str(value), *_totals(mine), end_section=value == values[-1])
    return table


def _totals(results: Sequence[CaseResult]) -> list[str]:
    totals = (
        len(results),
        sum(result.tokens_compared for result in results),
        sum(result.accepted_tokens for result in results),
        sum(result.preemptions for result in results),
        sum(result.mismatched_tokens for result in results),
    )
    return [f"{total:,}" for total in totals]


def _verdict(result: LosslessResult, assembly: Assembly) -> str:
    lines = [
        f"{result.tokens_compared:,} tokens compared in {len(result.cases)} cases, "
        f"{result.mismatched_tokens:,} mismatched; numerics: {assembly.numerics}"
    ]
    if result.shortages and not result.preemptions:
        lines.append("not a proof: slots were made scarce, and still no sequence was preempted")
    return "\n".join([*lines, *(_described(result.first, assembly.tokenizer) if result.first else [])])


def _described(mismatch: Mismatch, tokenizer: ChatTokenizer) -> list[str]:
    place, question = mismatch.position, mismatch.question
    expected, got = mismatch.expected.token_ids[place:], mismatch.got.token_ids[place:]
    return [
        f"first mismatch: {mismatch.case}",
        f"  prompt {question.prompt}, temperature {question.temperature}, extras {question.extras}, "
        f"seed {question.seed}, token {place} of the answer",
        f"  expected {list(expected[:8])} {tokenizer.decode(expected[:8])!r}, end: {mismatch.expected.finish_reason}",
        f"  got      {list(got[:8])} {tokenizer.decode(got[:8])!r}, end: {mismatch.got.finish_reason}",
    ]


def _row(result: CaseResult) -> dict[str, object]:
    return {
        **{title.replace(", ", "_").replace(" ", "_"): str(choice(result.case)) for title, _, choice in _CHOICES},
        "answers": result.answers,
        "tokens_compared": result.tokens_compared,
        "mismatched_tokens": result.mismatched_tokens,
        "accepted_tokens": result.accepted_tokens,
        "preemptions": result.preemptions,
    }


def _summary(result: LosslessResult, assembly: Assembly) -> dict[str, object]:
    return {
        "tokens_compared": result.tokens_compared,
        "mismatched_tokens": result.mismatched_tokens,
        "numerics": assembly.numerics,
        "cases": len(result.cases),
        "preemptions": result.preemptions,
    }
