"""The benchmarks of what requests share, on a tiny model."""

from dataclasses import replace

from benchmarks.prefix import measure, prompts_alike, row_of
from service.assembly import Assembly
from tests.tiny_models import random_prompts


def test_later_prompts_are_found_and_answered_alike(assembly: Assembly) -> None:
    prompts = prompts_alike([[number, *end] for number, end in enumerate(random_prompts(5, 9))], 5, 60)
    assert len({tuple(prompt[:60]) for prompt in prompts}) == 1
    ways = [assembly.engine(limits=replace(assembly.limits, prefix_cache=way)) for way in (False, True)]
    read, kept = (measure(engine, prompts, max_tokens=6) for engine in ways)
    assert [one.cached_tokens for one in kept] == [0, 59, 59, 59, 59]
    row = row_of(kept, read, prefix_cache=True, shared_tokens=60)
    assert (row.requests, row.cached_tokens, row.mismatched_tokens) == (5, 4 * 59, 0)
    wrong = [replace(one, tokens=(*one.tokens[:-1], -1)) for one in kept]
    assert row_of(wrong, read, prefix_cache=True, shared_tokens=60).mismatched_tokens == 5
