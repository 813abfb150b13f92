"""Grammars on draft trees: what is forbidden needs no row, what is forced needs no drafter, and masks follow paths. And
answers that are generated again: what they have written before needs no drafter either, and is believed by no one."""

import random
from dataclasses import replace

import pytest
import torch
from pydantic import JsonValue

from drafters.tree import MAX_DEPTH, ROOT, DraftTree
from service.engine.budget import DraftBudget, FixedBudget, StepLoad
from service.engine.grammar import constrained, forbidden_tokens, with_runs_of
from service.engine.requests import SamplingParams
from service.text.grammars import Grammar, GrammarCompiler
from service.text.tokenizer import ChatTokenizer
from tests.drafters.trees import assert_valid_tree
from tests.service.engine.harness import generate, request, tiny_engine
from tests.tiny_models import EOS_ID, VOCAB_SIZE, random_prompts, tiny_tokenizer

TOKENIZER = ChatTokenizer(tiny_tokenizer())
COMPILER = GrammarCompiler(TOKENIZER, VOCAB_SIZE, frozenset({EOS_ID}))
SCHEMA: JsonValue = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["question", "answer"]},
        "mark": {"enum": [1, 20]},
        "name": {"type": "string", "maxLength": 9},
    },
    "required": ["kind", "mark", "name"],
    "additionalProperties": False,
}


def regex(expression: str) -> Grammar:
    return COMPILER.compile("regex", expression)


def tree(*nodes: tuple[str, int]) -> DraftTree:
    """Of characters with their parents; survival halves with every node."""
    tokens = [TOKENIZER.encode(character)[0] for character, _ in nodes]
    parents = [parent for _, parent in nodes]
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent == ROOT else depths[parent] + 1)
    survival = [0.5 ** (place + 1) for place in range(len(nodes))]
    return DraftTree(
        torch.tensor([tokens]),
        torch.tensor([parents]),
        torch.tensor([depths]),
        torch.tensor([survival]),
        torch.tensor([len(nodes)]),
    )


def paths_of(found: DraftTree) -> dict[str, float]:
    """Survival of each path, as text."""
    texts: list[str] = []
    for token, parent in zip(found.tokens[0].tolist(), found.parents[0].tolist(), strict=True):
        texts.append((texts[parent] if parent != ROOT else "") + TOKENIZER.decode([token]))
    return dict(zip(texts[: int(found.num_nodes)], found.survival[0].tolist(), strict=False))


def test_masks_follow_the_path() -> None:
    state = regex("a[bc]d").begin()
    a, b, c, d, x = (TOKENIZER.encode(character)[0] for character in "abcdx")
    forbidden = forbidden_tokens([state] * 4, [[], [a], [a, b], [x]], VOCAB_SIZE)
    allowed = [set((~line).nonzero()[:, 0].tolist()) for line in forbidden]
    assert {a} <= allowed[0] <= {a, *range(VOCAB_SIZE)} - {b, c, d, x}
    assert {b, c} <= allowed[1]
    assert not {a, d} & allowed[1]
    assert d in allowed[2]
    assert allowed[3] == set(range(VOCAB_SIZE)), "no one stands behind an impossible path"
    state.extend([a, b, d])
    assert set((~forbidden_tokens([state], [[]], VOCAB_SIZE)[0]).nonzero()[:, 0].tolist()) == {EOS_ID}


def test_what_a_mask_leaves_is_what_is_allowed() -> None:
    """Along a walk through the grammar, for every token."""
    for seed in range(8):
        rng, state = random.Random(seed), COMPILER.compile("json_schema", SCHEMA).begin()
        path: list[int] = []
        while EOS_ID not in path:
            left = set((~forbidden_tokens([state], [path], VOCAB_SIZE)[0]).nonzero()[:, 0].tolist())
            known = {token for token in range(VOCAB_SIZE) if state.allows(path, token)}
            assert known == left or (not known and left == {EOS_ID})
            path.append(rng.choice(sorted(left)))
            if len(path) == 5 and EOS_ID not in path:
                state.extend(path)
                path = []
        assert not state.allows(path, 0)


def test_forbidden_nodes_and_all_below_them_are_gone() -> None:
    found = constrained(tree(("a", ROOT), ("x", ROOT), ("b", 0), ("y", 0), ("b", 1)), [regex("a[bc][de]").begin()], 12)
    assert_valid_tree(found)
    assert set(paths_of(found)) == {"a", "ab"}


def test_forced_tokens_are_as_sure_as_what_they_follow() -> None:
    found = constrained(tree(("b", ROOT), ("c", ROOT)), [regex("(bxy|c)(q)").begin()], 12)
    assert_valid_tree(found)
    survival = paths_of(found)
    assert survival["b"] == 0.5
    longest = max(survival, key=len)
    assert (longest, survival[longest]) == ("bxyq", 0.5)
    assert survival["cq"] == 0.25


def test_forced_tokens_need_no_drafter() -> None:
    nothing = DraftTree.empty(1)
    assert set(paths_of(constrained(nothing, [regex("xyz[ab]").begin()], 12))) >= {"xyz"}
    assert constrained(nothing, [regex("[ab]").begin()], 12).num_nodes.tolist() == [0]


def test_what_is_known_goes_no_deeper_than_trees_do() -> None:
    """Merged without compiled kernels, too, as on a device."""
    (spoken,) = random_prompts(1, 100, seed=9)
    assert with_runs_of(DraftTree.empty(1), [spoken], 128).num_nodes.tolist() == [MAX_DEPTH]
    state = regex("a{999}").begin()
    forced = (state.forced([]) or [])[:1] * 60
    places = torch.arange(60)[None]
    chain = DraftTree(torch.tensor([forced]), places - 1, places + 1, torch.ones(1, 60), torch.tensor([60]))
    found = constrained(chain, [state], 128)
    assert_valid_tree(found)
    assert int(found.depths.max()) == MAX_DEPTH


def test_texts_without_a_grammar_keep_their_trees() -> None:
    one = tree(("a", ROOT), ("x", 0))
    both = DraftTree(*(torch.cat([values, values]) for values in one))
    found = constrained(both, [None, regex("ab").begin()], 12)
    assert found.num_nodes.tolist() == [2, 2]
    assert paths_of(found.first(1)) == paths_of(one)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", ["random", "memory"])
def test_drafting_changes_no_token(drafter: str, temperature: float) -> None:
    grammar = COMPILER.compile("json_schema", SCHEMA)
    params = SamplingParams(seed=3, max_tokens=120, temperature=temperature)
    asked = [
        replace(
            request(str(number), prompt, replace(params, seed=number), n=2), grammar=grammar if number % 2 else None
        )
        for number, prompt in enumerate(random_prompts(4, 20, seed=9))
    ]
    plain, drafted = (generate(tiny_engine(drafter=name), *asked) for name in ("none", drafter))
    assert {key: one.tokens for key, one in plain.items()} == {key: one.tokens for key, one in drafted.items()}
    bound = [one for (name, _), one in drafted.items() if int(name) % 2]
    assert {one.end.finish_reason for one in bound} == {"stop"}
    assert all(one.text.startswith('{"kind": "') and one.text.endswith('"}') for one in bound)
    assert min(one.accepted for one in bound) > 10, "what is forced was drafted"


class Suspended(FixedBudget):
    """Never runs the drafter."""

    def decide(self, load: StepLoad, *, starts: bool) -> DraftBudget:
        return replace(super().decide(load, starts=starts), reason="suspended", drafted=False)


def test_where_drafting_is_suspended_forced_tokens_are_verified_all_the_same() -> None:
    policy = Suspended(8)
    (prompt,) = random_prompts(1, 20, seed=9)
    grammar = COMPILER.compile("json_schema", SCHEMA)
    asked = replace(request("a", prompt, SamplingParams(seed=1, max_tokens=60)), grammar=grammar)
    (plain,), (forced,) = (
        generate(tiny_engine(drafter="random", policy=one), asked).values() for one in (FixedBudget(0), policy)
    )
    assert forced.tokens == plain.tokens
    assert forced.accepted > 10 > plain.accepted
    assert generate(tiny_engine(drafter="random", policy=policy), replace(asked, grammar=None))["a", 0].accepted == 0


def params(seed: int, temperature: float) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=60, temperature=temperature, ignore_eos=True)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("policy", [FixedBudget(12), Suspended(12)])
def test_what_was_written_before_is_verified_many_tokens_at_a_time(temperature: float, policy: FixedBudget) -> None:
    asked = [
        request(str(seed), prompt, params(seed, temperature), n=2)
        for seed, prompt in enumerate(random_prompts(3, 20, seed=9))
    ]
    plain = generate(tiny_engine(drafter="none"), *asked)
    lengths = {("0", 0): 60, ("0", 1): 0, ("1", 0): 31, ("1", 1): 60, ("2", 0): 0, ("2", 1): 0}
    again = [
        replace(
            one,
            replayed=tuple(
                tuple(plain[one.request_id, index].tokens[: lengths[one.request_id, index]]) for index in (0, 1)
            ),
        )
        for one in asked
    ]
    found = generate(tiny_engine(drafter="none", policy=policy), *again)
    for key, one in found.items():
        assert one.tokens == plain[key].tokens
        # The first token comes from reading the prompt; each step brings one token beside the nodes that were right.
        assert one.accepted >= lengths[key] * 12 // 13 - 2
        assert len(one.accepted_per_step) == 59 - one.accepted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_was_not_written_changes_nothing(temperature: float) -> None:
    (prompt,) = random_prompts(1, 20, seed=9)
    asked = request("a", prompt, params(1, temperature))
    (plain,) = generate(tiny_engine(drafter="none"), asked).values()
    wrong = [*plain.tokens[:20], (plain.tokens[20] + 1) % VOCAB_SIZE, *plain.tokens[21:]]
    (found,) = generate(tiny_engine(drafter="none"), replace(asked, replayed=(tuple(wrong),))).values()
    assert found.tokens == plain.tokens
    assert 15 <= found.accepted <= 20
