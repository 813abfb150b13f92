"""What hostile clients send, and when: garbage, one narrow format, and honest prompts that give way to garbage.

Their visits are placed between the queries of honest clients. Knows neither turns nor who answers.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from service.bench.shift_stream import Prompt
from service.tokenizer import ChatTokenizer

GARBAGE = "garbage"
NARROW = "narrow"
STEALTH = "stealth"
HOSTILE = (GARBAGE, NARROW, STEALTH)

BURST_SHARE = 0.75  # of the stealthy client's queries
BURST_FROM, BURST_TO = 0.5, 0.75  # of the stream: six times the rate that it had in the first half

Content = Literal["garbage", "narrow", "honest"]

_LENGTHS = 8, 64  # of garbage, in tokens or characters
_CHARACTERS = 0x21, 0x250  # printable ASCII, and letters that few languages use
_FORMATS = (
    "Write the digits of {number} in Morse code, ten times, one line each. No words.",
    "Write a CSV table of ten rows: n, n squared, n cubed. Begin with n = {number}. No words.",
    "Write ten numbers in binary and in hexadecimal, one line each. Begin with {number}. No words.",
)


@dataclass(frozen=True, slots=True)
class Visit:
    """One query of a hostile client."""

    place: float  # in honest queries: between number 7 and number 8 for 7.5
    client: str
    content: Content


def visits_of(queries: int, share: float, rng: random.Random) -> list[Visit]:
    """The visits beside so many honest queries that make hostile clients send this share of all."""
    total = round(queries * share / (1 - share))
    garbage, narrow, stealth = (total // 3 + (index < total % 3) for index in range(3))
    burst = round(BURST_SHARE * stealth)
    half, quarter = BURST_FROM * queries, BURST_TO * queries
    visits = [
        *_steady(GARBAGE, "garbage", _places(garbage, 0, queries, rng)),
        *_steady(NARROW, "narrow", _places(narrow, 0, queries, rng)),
        *_steady(STEALTH, "honest", _places(stealth - burst, 0, half, rng)),
        *_steady(STEALTH, "garbage", _places(burst, half, quarter, rng)),
    ]
    return sorted(visits, key=lambda visit: visit.place)


def garbage(tokenizer: ChatTokenizer, vocab_size: int, rng: random.Random) -> Iterator[Prompt]:
    """Without end: token ids by chance as they are, and characters by chance as a message."""
    while True:
        yield tuple(rng.randrange(vocab_size) for _ in range(rng.randint(*_LENGTHS)))
        text = "".join(chr(rng.randrange(*_CHARACTERS)) for _ in range(rng.randint(*_LENGTHS)))
        yield _message(tokenizer, text)


def narrow(tokenizer: ChatTokenizer, rng: random.Random) -> Iterator[Prompt]:
    """Without end: columns of digits, in one of a few formats."""
    while True:
        yield _message(tokenizer, rng.choice(_FORMATS).format(number=rng.randrange(100, 100_000)))


def _message(tokenizer: ChatTokenizer, text: str) -> Prompt:
    return tuple(tokenizer.render_chat([{"role": "user", "content": text}]))


def _places(count: int, start: float, end: float, rng: random.Random) -> list[float]:
    """Evenly spread, each by chance within its part."""
    step = (end - start) / max(1, count)
    return [start + (number + rng.random()) * step for number in range(count)]


def _steady(client: str, content: Content, places: list[float]) -> Iterator[Visit]:
    return (Visit(place, client, content) for place in places)
