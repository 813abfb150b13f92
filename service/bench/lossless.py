"""`adaptree check lossless`: compares every way of decoding with plain decoding of one sequence, token by token."""

import hashlib
import itertools
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rich.table import Table
from rich.text import Text

from drafters.tree import MAX_NODES
from service.assembly import Assembly
from service.bench.driver import Answer, generate
from service.bench.experiment import conclude, count_mismatches, counted, plain_engine, prepare
from service.config import ServiceConfig
from service.engine.budget import FixedBudget
from service.engine.costs import FREE, Costs
from service.engine.engine import Engine
from service.engine.measuring import measure_costs
from service.engine.requests import GenerationRequest, SamplingParams
from service.text.grammars import Grammar
from service.text.prompts import read_prompt_set, refuse_too_long
from service.text.tokenizer import ChatTokenizer

Extras = Literal["none", "penalties", "top_p", "min_p+top_k", "stop", "grammar"]
Company = Literal["alone", "among 15", "short of slots"]

NUM_COMPANIONS = 15
BUILT_IN = Path(__file__).with_name("lossless_prompts.jsonl")
"""Short and long prompts, code, lists, stories, sums, other languages, and repetitive texts."""

_SCHEMA = Path(__file__).with_name("lossless_schema.json")  # schema of answers with `grammar`
_CASES_PER_ROUND = 192  # cases that share their questions; the next round has others
_WRONG_EVERY = 7  # period of wrong tokens in a prediction
_SLOT_SHARE = 0.6  # if slots are scarce: their number, as a share of what all sequences would fill
_PREEMPT_EVERY = 6  # steps between forced preemptions if slots are scarce
_STOP_LENGTH = 3  # characters of a stop string, which mostly spans several tokens


class Way(NamedTuple):
    """A way of decoding: a drafter, and the number of nodes verified per step."""

    drafter: str
    nodes: int | None  # nodes per step; None lets the cost budget choose

    def __str__(self) -> str:
        if self.drafter == "none":
            return "none"
        return f"{self.drafter}, {'cost' if self.nodes is None else self.nodes}"


class Case(NamedTuple):
    """One combination to check: sampling, way of decoding, other running sequences, and prefill chunk in tokens."""

    temperature: float
    extras: Extras
    way: Way
    company: Company
    prefill_chunk: int


TEMPERATURES = (0.0, 0.7, 1.0, 1.5)
EXTRAS: Mapping[Extras, Mapping[str, Any]] = {
    "none": {},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "top_p": {"top_p": 0.9},
    "min_p+top_k": {"min_p": 0.05, "top_k": 40},
    "stop": {"ignore_eos": False, "min_tokens": 4},
    "grammar": {"ignore_eos": False},
}
"""Changed sampling parameters by name. With `stop` and `grammar`, answers may end early."""

WAYS = (*(Way("memory", nodes) for nodes in (None, 16, 48)), Way("none", 0))
TRAINED_WAYS = Way("memory+specblock", None), Way("memory+specblock", 16), Way("specblock", 48)
"""Further ways if there is a trained drafter."""

COMPANIES: tuple[Company, ...] = ("alone", "among 15", "short of slots")
PREFILL_CHUNKS = (256, 17, 64)
SAMPLINGS = tuple(itertools.product(TEMPERATURES, EXTRAS))

_CHOICES: Mapping[str, Sequence[object]] = {
    "temperature": TEMPERATURES,
    "sampling": tuple(EXTRAS),
    "drafter, nodes": WAYS + TRAINED_WAYS,
    "company": COMPANIES,
    "prompt chunks": PREFILL_CHUNKS,
}
"""Possible values of each field of a case, in the order of the fields."""


def ways_of(assembly: Assembly) -> tuple[Way, ...]:
    """List the ways to check: those of this target, or of the configured drafter if that is not `auto`."""
    own = tuple(Way(assembly.drafter_name, nodes) for nodes in (None, 16, 48))
    if assembly.config.drafter != "auto":
        return own
    ways: tuple[Way, ...] = WAYS if assembly.weights is None else WAYS + TRAINED_WAYS
    return ways if assembly.drafter_name in {way.drafter for way in ways} else ways + own


def ordered_cases(seed: int, ways: Sequence[Way] = WAYS) -> list[Case]:
    """List all cases once: first a few that contain every pair of choices, then the others in random order."""
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
    """Return all pairs of a case's choices, each with the index of its field."""
    return set(itertools.combinations(enumerate(case), 2))


class Question(NamedTuple):
    """A prompt and the sampling of its answer, which together determine the answer."""

    prompt: int  # index of the prompt
    temperature: float
    extras: Extras
    seed: int


@dataclass(frozen=True, slots=True)
class Mismatch:
    """An answer compared with plain decoding's answer to the same question; they may also be equal."""

    case: Case
    question: Question
    expected: Answer
    got: Answer

    @property
    def position(self) -> int:
        """Index of the first token that differs."""
        pairs = list(zip(self.expected.token_ids, self.got.token_ids, strict=False))
        return next((index for index, (a, b) in enumerate(pairs) if a != b), len(pairs))

    @property
    def num_tokens(self) -> int:
        """Number of tokens that differ; 1 if only text or finish reason differ."""
        expected, got = self.expected, self.got
        tokens = count_mismatches(expected.token_ids, got.token_ids)
        return tokens or int((expected.text, expected.finish_reason) != (got.text, got.finish_reason))

    def described(self, tokenizer: ChatTokenizer) -> str:
        """Describe the case, the question, and eight tokens of both answers from the first difference on."""
        case, question = self.case, self.question
        expected, got = (one.token_ids[self.position :][:8] for one in (self.expected, self.got))
        return (
            f"first mismatch: temperature {case.temperature}, extras {case.extras}, drafter {case.way}, "
            f"{case.company}, chunks of {case.prefill_chunk}\n"
            f"  prompt {question.prompt}, temperature {question.temperature}, extras {question.extras}, "
            f"seed {question.seed}, token {self.position} of the answer\n"
            f"  expected {list(expected)} {tokenizer.decode(expected)!r}, end: {self.expected.finish_reason}\n"
            f"  got      {list(got)} {tokenizer.decode(got)!r}, end: {self.got.finish_reason}"
        )


class Tally(NamedTuple):
    """Counts of one case, or sums over several."""

    answers: int = 0
    tokens_compared: int = 0
    mismatched_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class LosslessResult:
    """Result of a check: the cases with their counts, and the first mismatch, or None."""

    cases: Sequence[tuple[Case, Tally]]
    first: Mismatch | None
    plain_answers: str  # hash of plain decoding's answers, equal wherever the same bits are computed

    @property
    def total(self) -> Tally:
        """The sum over all cases."""
        return _sum(tally for _, tally in self.cases)

    @property
    def unproved(self) -> bool:
        """Whether slots were made scarce, but no sequence was preempted, so that preemption was not checked."""
        return not self.total.preemptions and any(case.company == "short of slots" for case, _ in self.cases)

    @property
    def holds(self) -> bool:
        """Whether no token differs, and scarce slots led to preemptions."""
        return not self.total.mismatched_tokens and not self.unproved


def _sum(tallies: Iterable[Tally]) -> Tally:
    return Tally(*map(sum, zip(*tallies, strict=True)))


def check(
    assembly: Assembly,
    prompts: Sequence[Sequence[int]],
    *,
    num_tokens: int,
    seed: int = 0,
    answer_tokens: int = 64,
    cases: Sequence[Case] = (),
    advance: Callable[[int], None] = lambda tokens: None,
) -> LosslessResult:
    """Run the cases (by default all, in a loop) until `num_tokens` are compared. Calls `advance` with each case's
    number of tokens."""
    refuse_too_long(prompts, answer_tokens, assembly.limits.max_model_len, "the lossless check")
    assembly = replace(assembly, costs=assembly.costs or Costs(measure_costs(assembly.target, assembly.limits), FREE))
    grammar = assembly.grammars.compile("json_schema", json.loads(_SCHEMA.read_text(encoding="utf-8")))
    plain = plain_engine(assembly, replace(assembly.limits, steps_ahead=0))
    bench = _Bench(assembly, prompts, answer_tokens, seed, grammar, plain)
    upcoming = itertools.cycle(cases or ordered_cases(seed, ways_of(assembly)))
    results: list[tuple[Case, Tally]] = []
    while sum(tally.tokens_compared for _, tally in results) < num_tokens:
        case = next(upcoming)
        results.append((case, bench.run(case, len(results))))
        advance(results[-1][1].tokens_compared)
    return LosslessResult(results, bench.first, bench.plain_answers)


@dataclass(slots=True)
class _Bench:
    """Runs cases; keeps the first mismatch, and plain decoding's answers for later cases with the same questions."""

    assembly: Assembly
    prompts: Sequence[Sequence[int]]
    answer_tokens: int
    seed: int
    grammar: Grammar
    plain: Engine
    references: dict[Question, Answer] = field(default_factory=dict)
    first: Mismatch | None = None

    @property
    def plain_answers(self) -> str:
        """Hash of the answers of plain decoding so far, in the order of their questions."""
        answers = [[*question, answer.token_ids] for question, answer in self.references.items()]
        return hashlib.sha256(json.dumps(answers).encode()).hexdigest()

    def run(self, case: Case, number: int) -> Tally:
        """Answer a case's questions in its way of decoding, and compare them with plain decoding."""
        questions = self._questions(case, number)
        expected = [self._reference(question) for question in questions]
        requests = [self._request(question, name, case.way) for name, question in enumerate(questions)]
        engine = self._engine(case, questions)

        last = -1

        def preempt(step: int) -> None:
            """Preempt every few steps, in case answers end so soon that slots suffice, where no step is in flight."""
            nonlocal last
            running = engine.scheduler.running
            if step - last >= _PREEMPT_EVERY and len(running) > 1 and not running[-1].steps_in_flight:
                engine.scheduler.preempt(running[-1])
                last = step

        scarce = case.company == "short of slots"
        run = generate(engine, requests, before_step=preempt if scarce else lambda step: None)
        engine.assert_conserved()
        pairs = zip(questions, expected, run.answers, strict=True)
        compared = [Mismatch(case, question, want, got) for question, want, got in pairs]
        self.first = self.first or next((one for one in compared if one.num_tokens), None)
        return Tally(
            answers=len(compared),
            tokens_compared=sum(len(answer.token_ids) for answer in expected),
            mismatched_tokens=sum(one.num_tokens for one in compared),
            accepted_tokens=sum(sum(answer.accepted_per_step) for answer in run.answers),
            preemptions=sum(step.stats.preemptions for step in run.steps),
        )

    def _questions(self, case: Case, number: int) -> list[Question]:
        """Choose the case's own question, then those of its companions; few per round, as plain decoding is slow."""
        turn = number // _CASES_PER_ROUND
        kind = SAMPLINGS.index((case.temperature, case.extras))
        own = (kind + turn) % len(self.prompts)
        questions = [Question(own, case.temperature, case.extras, self.seed + turn)]
        if case.company == "alone":
            return questions
        for other in ((own + offset) % len(self.prompts) for offset in range(1, NUM_COMPANIONS + 1)):
            temperature, extras = SAMPLINGS[(other * 7 + turn) % len(SAMPLINGS)]
            questions.append(Question(other, temperature, extras, self.seed + turn))
        return questions

    def _reference(self, question: Question) -> Answer:
        if question not in self.references:
            (answer,) = generate(self.plain, [self._request(question, 0)]).answers
            self.references[question] = answer
        return self.references[question]

    def _request(self, question: Question, name: int, way: Way | None = None) -> GenerationRequest:
        """Build a request, with a prediction if the budget is fixed, so that many drafts are accepted."""
        is_predicted = way is not None and way.nodes
        return GenerationRequest(
            request_id=str(name),
            prompt=self.prompts[question.prompt],
            sampling=sampling_params(question, self.answer_tokens, self._stop(question)),
            prediction=_predict(self._reference(question).token_ids, self.assembly) if is_predicted else (),
            grammar=self.grammar if question.extras == "grammar" else None,
        )

    def _stop(self, question: Question) -> tuple[str, ...]:
        """Choose a stop string: a piece of the answer that plain decoding gives without stop strings."""
        if question.extras != "stop":
            return ()
        text = self._reference(question._replace(extras="none")).text
        start = 2 * len(text) // 3
        return (text[start : start + _STOP_LENGTH],) if text else ()

    def _engine(self, case: Case, questions: Sequence[Question]) -> Engine:
        """Build the engine of a case, as far as there are states. Scarce slots suffice for any one sequence with a full
        tree, but not for all."""
        configured, nodes = self.assembly.limits, case.way.nodes
        lengths = [len(self.prompts[question.prompt]) + self.answer_tokens for question in questions]
        pool = self.assembly.target.pool
        most = pool.states.sequences if pool.shape.bytes_per_state else NUM_COMPANIONS + 1
        too_few = max(pool.least_slots(max(lengths), MAX_NODES), min(int(_SLOT_SHARE * sum(lengths)), pool.num_slots))
        limits = replace(
            configured,
            prefill_chunk=case.prefill_chunk,
            max_budget=configured.max_budget if nodes is None else nodes,
            max_sequences=max(configured.max_sequences, min(NUM_COMPANIONS + 1, most)),
            num_slots=too_few if case.company == "short of slots" else None,
        )
        policy = None if nodes is None else FixedBudget(nodes)
        return self.assembly.engine(self.assembly.drafter(case.way.drafter, limits), policy, limits)


def sampling_params(question: Question, max_tokens: int, stop: tuple[str, ...]) -> SamplingParams:
    """Build the sampling parameters of a question."""
    extras = {"ignore_eos": True, "stop": stop, **EXTRAS[question.extras]}
    return SamplingParams(seed=question.seed, max_tokens=max_tokens, temperature=question.temperature, **extras)


def _predict(answer: Sequence[int], assembly: Assembly) -> list[int]:
    """Return the answer with every seventh token wrong, so that some drafts are rejected."""
    size = assembly.target.vocab_size
    return [(token + (index % _WRONG_EVERY == 3)) % size for index, token in enumerate(answer)]


def run_lossless(config: ServiceConfig, file: Path | None, *, num_tokens: int, seed: int, out: Path | None) -> bool:
    """Run the check and report it; returns whether every token was the same and preemption was checked."""
    assembly = prepare(config, out)
    prompts = read_prompt_set(file or BUILT_IN, assembly.tokenizer).prompts
    with counted(num_tokens, "tokens compared") as advance:
        result = check(assembly, prompts, num_tokens=num_tokens, seed=seed, advance=advance)
    total, names = result.total, [title.replace(", ", "_").replace(" ", "_") for title in _CHOICES]
    rows = [dict(zip(names, map(str, case), strict=True)) | tally._asdict() for case, tally in result.cases]
    summary = {
        "tokens_compared": total.tokens_compared,
        "mismatched_tokens": total.mismatched_tokens,
        "numerics": assembly.numerics,
        "cases": len(result.cases),
        "preemptions": total.preemptions,
        "tensor_parallel": config.tensor_parallel,
        "plain_answers": result.plain_answers,
    }
    conclude(assembly, out, rows, summary, _table(result), Text(_verdict(result, assembly)))
    return result.holds


def _table(result: LosslessResult) -> Table:
    """Build a table with one line per choice; every case counts once in each section."""
    table = Table("", "choice", "cases", "tokens compared", "accepted", "preemptions", "mismatched")
    for index, (title, choices) in enumerate(_CHOICES.items()):
        values = list(dict.fromkeys([*choices, *(case[index] for case, _ in result.cases)]))
        for value in values:
            mine = [tally for case, tally in result.cases if case[index] == value]
            total = _sum(mine)
            counts = (total.tokens_compared, total.accepted_tokens, total.preemptions, total.mismatched_tokens)
            cells = (f"{count:,}" for count in (len(mine), *counts))
            table.add_row(title, str(value), *cells, end_section=value == values[-1])
    return table


def _verdict(result: LosslessResult, assembly: Assembly) -> str:
    lines = [
        f"{result.total.tokens_compared:,} tokens compared in {len(result.cases)} cases, "
        f"{result.total.mismatched_tokens:,} mismatched; numerics: {assembly.numerics}",
        f"hash of plain decoding's answers: {result.plain_answers}",
    ]
    if result.unproved:
        lines.append("preemption was not checked: slots were made scarce, but no sequence was preempted")
    if result.first:
        lines.append(result.first.described(assembly.tokenizer))
    return "\n".join(lines)
