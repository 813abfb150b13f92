"""The queries of a poisoning benchmark: honest clients' prompts in turns, and the same turns with hostile ones between.

An honest query has the same number, and so the same seed, with and without an attack. Knows neither who answers nor
who learns.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from service.bench.poison_clients import BURST_FROM, BURST_TO, Content, Visit
from service.bench.shift_stream import AskedQuery, Phase, Prompt, Stream, Turn, turns_of


def honest_stream(prompts: Sequence[Prompt]) -> Stream:
    """Honest prompts, cut where the attack changes. Empty stretches of very short streams are left out."""
    burst, after = (round(share * len(prompts)) for share in (BURST_FROM, BURST_TO))
    pieces = {"before": prompts[:burst], "burst": prompts[burst:after], "after": prompts[after:]}
    return Stream(tuple(Phase(name, tuple(piece)) for name, piece in pieces.items() if piece), new_from=0)


def honest_turns(stream: Stream, size: int, clients: int, rng: random.Random) -> list[Turn]:
    """The stream in turns of `size` queries, each of a client by chance."""
    return [
        replace(turn, queries=tuple(replace(query, client=_honest(rng.randrange(clients))) for query in turn.queries))
        for turn in turns_of(stream, size)
    ]


def attacked(turns: Sequence[Turn], visits: Sequence[Visit], prompts: Mapping[Content, Iterator[Prompt]]) -> list[Turn]:
    """The same turns with hostile queries at their places, numbered behind all honest ones."""
    first = sum(len(turn.queries) for turn in turns)
    hostile = [
        (visit.place, AskedQuery(number, next(prompts[visit.content]), visit.client))
        for number, visit in enumerate(visits, start=first)
    ]
    return [_with_visitors(turn, hostile) for turn in turns]


def _with_visitors(turn: Turn, hostile: Sequence[tuple[float, AskedQuery]]) -> Turn:
    end = turn.first + len(turn.queries)
    honest = [(float(query.number), query) for query in turn.queries]
    visitors = [(place, query) for place, query in hostile if turn.first <= place < end]
    in_order = sorted([*honest, *visitors], key=lambda placed: placed[0])
    return replace(turn, queries=tuple(query for _, query in in_order))


def _honest(number: int) -> str:
    return f"honest {number + 1}"
