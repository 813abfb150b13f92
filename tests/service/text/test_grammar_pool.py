"""Senders take turns in compiling, within a budget for each request; what is compiled is kept for its scope alone."""

import asyncio
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from service.text.grammar_pool import GrammarPool
from service.text.grammars import Grammar, GrammarCompiler, GrammarError, Steps
from tests.service.text.grammar_parts import COMPILER


@pytest.fixture
async def pool() -> GrammarPool:
    return GrammarPool(COMPILER)


class Work:
    """Work without an end until `ends` is set, which counts its steps and how many do it at once."""

    def __init__(self) -> None:
        self.at_once, self.most_at_once, self.num_steps, self.num_begun, self.ends = 0, 0, 0, 0, False

    def steps(self, compiler: GrammarCompiler) -> Steps[str]:
        self.num_begun += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            while not self.ends:
                self.num_steps += 1
                yield
        finally:
            self.at_once -= 1
        return "made"

    async def has_begun(self) -> None:
        while not self.num_steps:
            await asyncio.sleep(0.001)


def begun(pool: GrammarPool, account: str, work: Work, source: str = "x", scope: str = "") -> "asyncio.Task[str]":
    return asyncio.create_task(pool.result(account, scope or account, source, work.steps))


async def compiled(pool: GrammarPool, kind: Any, source: Any) -> Grammar:
    steps = partial(GrammarCompiler.compiling, kind=kind, source=source)
    return await pool.result("d", "d", repr(source), steps)


async def test_a_sender_of_many_has_one_turn_and_others_compile_meanwhile(pool: GrammarPool) -> None:
    hostile = {name: Work() for name in "abc"}
    tasks = [begun(pool, name, work, source) for name, work in hostile.items() for source in "stuvwxyz"]
    for work in hostile.values():
        await work.has_begun()
    await compiled(pool, "regex", "[a-c]")
    assert not any(task.done() for task in tasks)
    assert [work.most_at_once for work in hostile.values()] == [1, 1, 1]
    for work in hostile.values():
        work.ends = True
    assert await asyncio.gather(*tasks) == ["made"] * 24
    assert [work.most_at_once for work in hostile.values()] == [1, 1, 1]


async def test_equal_ones_that_arrive_together_are_compiled_once_in_each_scope(pool: GrammarPool) -> None:
    own, others = Work(), Work()
    tasks = [begun(pool, "a", own) for _ in range(8)] + [begun(pool, "b", others)]
    await own.has_begun()
    await others.has_begun()
    own.ends = others.ends = True
    await asyncio.gather(*tasks)
    await begun(pool, "c", own, scope="a")
    assert (own.num_begun, others.num_begun) == (1, 1)


async def test_a_sender_that_leaves_ends_its_work_and_no_other(pool: GrammarPool) -> None:
    work = Work()
    leaves, stays = (begun(pool, "a", work) for _ in range(2))
    await work.has_begun()
    leaves.cancel()
    await asyncio.wait([leaves])
    while work.num_begun < 2:
        await asyncio.sleep(0.001)
    work.ends = True
    assert await stays == "made"
    steps = work.num_steps
    await begun(pool, "b", work)
    assert (leaves.cancelled(), work.at_once, work.num_steps) == (True, 0, steps)


async def test_what_is_kept_is_bounded_and_the_scope_with_the_most_loses_first(pool: GrammarPool) -> None:
    async def made(scope: str, source: str) -> int:
        work = Work()
        work.ends = True
        await begun(pool, scope, work, source)
        return work.num_begun

    assert await made("b", "x") == 1
    for number in range(300):
        assert await made("a", str(number)) == 1
    assert await made("a", "x" * 2**19) == 1
    assert await made("b", "x") == 0
    assert await made("a", "0") == 1
    assert len(pool._cached) <= 256
    assert sum(len(source) for _, source in pool._cached) <= 2**20


def test_a_chain_of_references_does_not_fill_the_stack() -> None:
    async def compile_all() -> None:
        pool = GrammarPool(COMPILER)
        rules = "\n".join(f'r{n}: "a" r{n + 1} | "b"' for n in range(7000))
        names = [f"r{n}" for n in range(1900)]
        chain = {one: {"properties": {"a": {"$ref": f"#/$defs/{other}"}}} for one, other in pairwise(names)}
        schema: Any = {"$ref": "#/$defs/r0", "$defs": {**chain, names[-1]: {"type": "null"}}}
        await compiled(pool, "lark", f'start: r0\n{rules}\nr7000: "c"')
        await compiled(pool, "json_schema", schema)

    asyncio.run(compile_all())


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("lark", "start: r0\n" + "\n".join(f"r{n}: r{n + 1}" for n in range(9000)) + '\nr9000: "c"'),
        ("lark", 'start: "a"' + ' | "a"' * 10_000 + "x" * 2**18),
        ("grammar", "root ::= r0\n" + "\n".join(f"r{n} ::= r{n + 1}" for n in range(2000)) + '\nr2000 ::= "c"'),
        ("choice", [f"v{number}" for number in range(100_000)]),
        ("json_schema", {"$ref": "#/$defs/0", "$defs": {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(9000)}}),
    ],
)
def test_what_might_take_long_or_end_the_process_is_refused(kind: Any, source: Any) -> None:
    with pytest.raises(GrammarError, match=r"longer than|more than"):
        COMPILER.compile(kind, source)
