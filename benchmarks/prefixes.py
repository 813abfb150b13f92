"""`python -m benchmarks prefixes`: prompt tokens that the prefix cache finds, with plain decoding and with drafts.

Traffic:

conversations  of ten turns; thoughts, the first half of every answer, are not sent again, as templates drop them
questions      behind one system prompt, four at a time and one after the other
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import NamedTuple

from benchmarks.shared import in_one_line, read_chats
from service.assembly import Assembly
from service.bench import experiment
from service.bench.commands import AnswerTokens, Out
from service.bench.driver import Answer, ClosedLoop, Drive
from service.bench.experiment import PLAIN, SPECULATIVE, Measure, Row
from service.bench.lossless import BUILT_IN
from service.config import LoadedConfig
from service.engine.engine import Engine
from service.engine.prefix_tree import common_length
from service.engine.requests import SequenceOutput

TURNS, QUESTIONS, CHARACTERS = 10, 20, 120  # of a conversation, behind a system prompt, of a message
_INSTRUCTIONS = 8  # messages that the system prompt is made of
Chat = list[dict[str, str]]


class Asked(NamedTuple):
    """A prompt, how many of its tokens the prefix cache had, and its answer."""

    prompt: list[int]
    found: int
    answer: Answer


Asker = Callable[[Sequence[Chat]], list[Asked]]
"""Asks several prompts at once."""


def ask(assembly: Assembly, engine: Engine, max_tokens: int, chats: Sequence[Chat]) -> list[Asked]:
    """Ask several prompts at once as chat completions do."""
    tokenizer, ended = assembly.tokenizer, list[SequenceOutput]()
    prompts = [tokenizer.render_chat(chat) for chat in chats]
    asked = experiment.requests_from(prompts, 0, Measure(0.0, max_tokens, len(prompts), 0))
    asked = [replace(one, messages_end=tokenizer.messages_end(one.prompt)) for one in asked]
    driven = Drive(engine, asked, ClosedLoop(len(asked)), after_step=lambda report: ended.extend(report.outputs))
    driven.go_on()
    found = {one.request_id: one.cached_tokens for one in ended if one.finish_reason is not None}
    return [Asked(prompts[at], found[str(at)], answer) for at, answer in enumerate(driven.result().answers)]


def conversations(asker: Asker, texts: Sequence[str], at_once: int) -> list[Asked]:
    """Hold so many conversations, and send no thoughts again."""
    asked, chats = list[Asked](), [Chat() for _ in range(at_once)]
    for first in range(0, TURNS * at_once, at_once):
        for number, chat in enumerate(chats, first):
            chat.append({"role": "user", "content": texts[number % len(texts)]})
        asked += asker(chats)
        for chat, one in zip(chats, asked[first:], strict=True):
            chat.append({"role": "assistant", "content": one.answer.text[len(one.answer.text) // 2 :]})
    return asked


def questions(asker: Asker, texts: Sequence[str], at_once: int) -> list[Asked]:
    """Ask questions behind one system prompt, so many at a time."""
    system = {"role": "system", "content": "\n".join(texts[-_INSTRUCTIONS:])}
    chats: list[Chat] = [[system, {"role": "user", "content": text}] for text in texts[:QUESTIONS]]
    return [one for first in range(0, len(chats), at_once) for one in asker(chats[first : first + at_once])]


def row_of(asked: Sequence[Asked]) -> Row:
    """Return the number of prompt tokens: all, found, read, and new, with which no earlier prompt and answer begins;
    how often the tokens were read with which all prompts begin, the median time to the first token, and the number of
    accepted drafts."""
    texts = [[*one.prompt, *one.answer.token_ids] for one in asked]
    known = [max((common_length(text, one.prompt) for text in texts[:at]), default=0) for at, one in enumerate(asked)]
    total, found = sum(len(one.prompt) for one in asked), sum(one.found for one in asked)
    shared, new = min(common_length(asked[0].prompt, one.prompt) for one in asked), total - sum(known)
    times = sum(max(0, shared - one.found) for one in asked) / shared
    counts = {"prompt_tokens": total, "found": found, "read": total - found, "new": new, "shared": shared}
    ratios = {"read_over_new": round((total - found) / new, 4), "times_shared_is_read": round(times, 4)}
    first = 1000 * median(one.answer.first_token_seconds for one in asked)
    return {
        **counts,
        **ratios,
        "median_ttft_ms": round(first, 1),
        "accepted": sum(sum(one.answer.accepted_per_step) for one in asked),
    }


def run(loaded: LoadedConfig, max_tokens: AnswerTokens = 32, out: Out = None) -> bool:
    """Count the prompt tokens that the prefix cache finds. Exit code 1 if drafts change their number or any token."""
    assembly, rows, differ = experiment.prepare(loaded.config, out), list[Row](), 0
    texts = [chat[-1]["content"][:CHARACTERS] for chat in read_chats(BUILT_IN)]
    for play, at_once in ((conversations, 4), (questions, 4), (questions, 1)):
        runs = list[list[Asked]]()
        for policy in (PLAIN, SPECULATIVE):  # one after the other: each has all slots and states
            engine = experiment.plain_engine(assembly) if policy == PLAIN else assembly.engine()
            runs.append(play(partial(ask, assembly, engine, max_tokens), texts, at_once))
            rows.append({"traffic": play.__name__, "at_once": at_once, "policy": policy, **row_of(runs[-1])})
        flat = [[value for one in asked for value in (one.found, *one.answer.token_ids)] for asked in runs]
        differ += experiment.count_mismatches(*flat)
    return experiment.conclude(assembly, out, rows, {"mismatched_tokens": differ}, *map(in_one_line, rows))
