from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st

from drafters.lookup.calibration import REACH
from drafters.lookup.drafter import LookupDrafter
from drafters.protocol import Committed, DraftContext, DraftingSizes, Noise
from drafters.tree import ROOT, Candidates, DraftTree, VerifyResult
from kernels.graph_runner import Capture
from kernels.lookup import CONTEXT
from kernels.trees import select_nodes
from tests.drafters.trees import assert_valid_tree, path_to
from tests.kernels.tensor_program import kernels, record
from tests.service.engine.host_reads import HostReads

PROMPT = list(range(100, 120))


def drafter(max_length: int = 256, capture: Capture | None = None) -> LookupDrafter:
    return LookupDrafter(DraftingSizes(max_sequences=4, max_length=max_length, max_nodes=64, capture=capture))


def grow(lookup: LookupDrafter, rows: Sequence[int]) -> Candidates:
    zeros = torch.zeros(len(rows), dtype=torch.int64)
    return lookup.grow(torch.tensor(rows), Noise(zeros, zeros.float(), zeros))


def commit(lookup: LookupDrafter, emitted: dict[int, Sequence[int]]) -> None:
    width = max(len(tokens) for tokens in emitted.values())
    tokens = torch.tensor([[*t, *[-1] * (width - len(t))] for t in emitted.values()])
    batch = len(emitted)
    nothing = torch.zeros(batch, 0, dtype=torch.int64)
    result = VerifyResult(nothing, torch.zeros(batch), torch.zeros(batch), torch.zeros(batch, 1))
    counts = torch.tensor([len(t) for t in emitted.values()])
    rows = torch.tensor(list(emitted))
    nowhere = torch.zeros_like(tokens)
    lookup.commit(Committed(rows, tokens, counts, DraftTree.empty(batch), result, None, counts, nowhere))


def words(tree: DraftTree, b: int = 0) -> list[list[int]]:
    """The tokens along the path to every node, likeliest node first."""
    return [[int(tree.tokens[b, j]) for j in path_to(tree, b, i)] for i in range(int(tree.num_nodes[b]))]


def likeliest_chain(tree: DraftTree, b: int = 0) -> list[int]:
    """The tokens met by always going to the likeliest child."""
    node, tokens = ROOT, []
    while children := [i for i in range(int(tree.num_nodes[b])) if tree.parents[b, i] == node]:
        node = children[0]
        tokens.append(int(tree.tokens[b, node]))
    return tokens


def replay(lookup: LookupDrafter, row: int, text: Sequence[int], budget: int = 16) -> int:
    """Generate `text` with what the drafter proposes; how many steps it took."""
    steps, done = 0, 0
    while done < len(text):
        tree, _ = select_nodes(grow(lookup, [row]), torch.tensor([budget]), budget)
        paths = words(tree)
        accepted = max(
            (len(p) for p in paths if list(text[done : done + len(p)]) == p and done + len(p) < len(text)), default=0
        )
        commit(lookup, {row: text[done : done + accepted + 1]})
        done, steps = done + accepted + 1, steps + 1
    return steps


def test_columns_are_those_in_use_and_captured_nobody_asks_for_them() -> None:
    lookup = drafter()
    lookup.start([DraftContext(1, PROMPT)])
    for token in range(9):
        commit(lookup, {1: [token], 2: [1, 2, 3, 4]})
    lookup.finish([2])
    assert lookup._history.columns(0) == CONTEXT + len(PROMPT) + 9 + 1
    with kernels():
        captured = drafter(capture=record)
    with HostReads() as reads:
        captured.start([DraftContext(1, PROMPT)])
        grow(captured, [1])
        captured.finish([1])
    assert [read for read in reads.seen if read.startswith("drafters.lookup.history:")] == []


def test_text_without_repetition_gets_no_tree() -> None:
    lookup = drafter()
    lookup.start([DraftContext(1, PROMPT)])
    assert grow(lookup, [1]).num_nodes.tolist() == [0]


def test_one_token_of_text_is_enough_to_start() -> None:
    lookup = drafter()
    lookup.start([DraftContext(0, [5])])
    assert grow(lookup, [0]).num_nodes.tolist() == [0]


def test_a_period_is_continued_as_far_as_copies_go() -> None:
    lookup = drafter()
    lookup.start([DraftContext(0, [9, *[1, 2, 3] * 8])])
    assert likeliest_chain(grow(lookup, [0])) == ([1, 2, 3] * REACH)[:REACH]


def test_two_continuations_become_two_branches_the_more_frequent_first() -> None:
    lookup = drafter()
    text = [1, 2, 3, 50, 51, 60, 1, 2, 3, 50, 51, 61, 1, 2, 3, 70, 71, 62, 1, 2, 3]
    lookup.start([DraftContext(0, text)])
    tree = grow(lookup, [0])
    proposed = words(tree)
    assert proposed[0] == [50]
    assert [50, 51, 60] in proposed
    assert [50, 51, 61] in proposed
    assert [70, 71] in proposed
    assert_valid_tree(tree)


def test_the_longer_match_comes_first() -> None:
    lookup = drafter()
    lookup.start([DraftContext(0, [1, 2, 3, 4, 50, 8, 4, 60, 9, 4, 60, 1, 2, 3, 4])])
    proposed = words(grow(lookup, [0]))
    assert proposed[0] == [50]
    assert [60] in proposed


def test_a_prediction_is_proposed_before_any_token_was_generated() -> None:
    lookup = drafter()
    answer = list(range(500, 540))
    lookup.start([DraftContext(0, PROMPT, answer)])
    assert likeliest_chain(grow(lookup, [0])) == answer[:REACH]


def test_a_prediction_outlives_edits_insertions_and_deletions() -> None:
    answer = [*range(500, 530), 7, *range(530, 560), 7, *range(560, 600)]
    changed = [*answer[:20], 900, *answer[21:45], 901, 902, *answer[45:60], *answer[65:]]
    lookup = drafter()
    lookup.start([DraftContext(0, PROMPT, answer)])
    steps = replay(lookup, 0, changed)
    assert steps <= len(changed) // REACH + 3 * 3 + 1
    # Three tokens were never predicted; after the two in a row and the gap one more may go by until the place is found.
    assert len(changed) - 5 <= lookup.finish([0])[0] <= len(changed) - 3


def test_behind_another_token_the_prediction_goes_on_as_if_it_were_exchanged_or_put_in() -> None:
    answer = list(range(500, 540))
    lookup = drafter()
    lookup.start([DraftContext(0, PROMPT, answer)])
    commit(lookup, {0: answer[:10]})
    grow(lookup, [0])
    commit(lookup, {0: [900]})
    proposed = words(grow(lookup, [0]))
    assert answer[11:14] in proposed
    assert answer[10:13] in proposed


def test_an_exchanged_token_costs_one_step() -> None:
    answer = list(range(500, 540))
    steps = []
    for text in (answer, [*answer[:20], 900, *answer[21:]]):
        lookup = drafter()
        lookup.start([DraftContext(0, PROMPT, answer)])
        steps.append(replay(lookup, 0, text))
    assert steps[1] <= steps[0] + 1


def test_after_an_edit_the_place_nearest_to_the_old_one_is_taken_up() -> None:
    """The token 7 stands all over the prediction; only the cursor tells which one is meant."""
    answer = [token for i in range(20) for token in (7, 500 + i, 600 + i)]
    lookup = drafter()
    lookup.start([DraftContext(0, PROMPT, answer)])
    commit(lookup, {0: answer[:17]})
    grow(lookup, [0])
    commit(lookup, {0: [999, answer[18]]})
    assert answer[18] == 7
    assert likeliest_chain(grow(lookup, [0]))[:4] == answer[19:23]
    lookup.start([DraftContext(0, [*PROMPT, *answer[:17], 999, 7], answer, num_generated=19)])
    assert likeliest_chain(grow(lookup, [0]))[:4] == answer[19:23]


def test_a_prediction_ends_where_it_ends() -> None:
    lookup = drafter()
    lookup.start([DraftContext(0, [1, 2, 3], [10, 11, 12])])
    assert likeliest_chain(grow(lookup, [0])) == [10, 11, 12]


def test_predicted_tokens_are_counted_once_and_only_from_the_prediction() -> None:
    lookup = drafter()
    lookup.start([DraftContext(0, [1, 2, 3, 4, 1, 2], [10, 11, 12, 13]), DraftContext(1, [1, 2, 3, 4, 1, 2])])
    grow(lookup, [0, 1])
    commit(lookup, {0: [10, 11, 99], 1: [3, 4]})
    grow(lookup, [0, 1])
    commit(lookup, {0: [98], 1: [1]})
    assert lookup.finish([0, 1]) == [2, 0]


def test_a_rejoined_sequence_goes_on_in_its_prediction() -> None:
    lookup = drafter()
    answer = [*range(500, 520), *range(540, 560)]
    lookup.start([DraftContext(0, [*PROMPT, *answer[:10]], answer, num_generated=10)])
    assert likeliest_chain(grow(lookup, [0])) == answer[10 : 10 + REACH]


def test_a_row_used_again_has_forgotten_the_old_text() -> None:
    lookup = drafter()
    lookup.start([DraftContext(0, [1, 2, 3, 4, 1, 2], [10, 11])])
    assert grow(lookup, [0]).num_nodes[0] > 0
    lookup.finish([0])
    lookup.start([DraftContext(0, [2])])
    commit(lookup, {0: [3]})
    assert grow(lookup, [0]).num_nodes.tolist() == [0]


def test_success_raises_survival_and_failure_lowers_it() -> None:
    def first_survival(lookup: LookupDrafter) -> float:
        lookup.start([DraftContext(0, [1, 2, 3, 50, 51, 60, 1, 2, 3])])
        return float(grow(lookup, [0]).survival[0, 0])

    right, wrong = drafter(), drafter()
    before = first_survival(right)
    for _ in range(20):
        first_survival(right)
        commit(right, {0: [50]})
        first_survival(wrong)
        commit(wrong, {0: [40]})
    assert first_survival(wrong) < before / 1.5
    assert first_survival(right) > before * 1.2


def test_only_nodes_whose_parent_came_true_are_learned_from() -> None:
    def second_odds(lookup: LookupDrafter) -> float:
        lookup.start([DraftContext(0, [1, 2, 3, 50, 51, 60, 1, 2, 3])])
        tree = grow(lookup, [0])
        assert words(tree)[:2] == [[50], [50, 51]]
        return float(tree.survival[0, 1] / tree.survival[0, 0])

    lookup = drafter()
    before = second_odds(lookup)
    for _ in range(20):
        second_odds(lookup)
        commit(lookup, {0: [40, 41]})
    assert abs(second_odds(lookup) - before) < 1e-5


def test_steps_without_drafting_teach_nothing() -> None:
    lookup = drafter()
    context = DraftContext(0, [1, 2, 3, 50, 51, 60, 1, 2, 3])
    lookup.start([context])
    before = float(grow(lookup, [0]).survival[0, 0])
    commit(lookup, {0: [50]})
    for _ in range(20):
        commit(lookup, {0: [40]})
    lookup.start([context])
    assert float(grow(lookup, [0]).survival[0, 0]) > before


texts = st.lists(st.integers(0, 5), min_size=1, max_size=60)


@given(st.lists(texts, min_size=1, max_size=4), st.lists(texts, min_size=4, max_size=4), st.booleans())
def test_rows_are_independent_and_trees_valid(prompts: list[list[int]], answers: list[list[int]], ask: bool) -> None:
    contexts = [DraftContext(3 - i, p, answers[i] if ask and i % 2 else ()) for i, p in enumerate(prompts)]
    together = drafter(64)
    together.start(contexts)
    rows = [context.row for context in contexts]
    tree = grow(together, rows)
    assert_valid_tree(tree)
    for b, context in enumerate(contexts):
        alone = drafter(64)
        alone.start([context])
        tree_alone = grow(alone, [context.row])
        assert torch.equal(tree_alone.tokens[0], tree.tokens[b])
        assert torch.equal(tree_alone.parents[0], tree.parents[b])
        assert torch.equal(tree_alone.survival[0], tree.survival[b])


@given(texts.filter(lambda text: len(text) > 1))
def test_every_proposal_of_a_short_match_stood_in_the_text(text: list[int]) -> None:
    lookup = drafter(64)
    lookup.start([DraftContext(0, text)])
    for proposed in words(grow(lookup, [0])):
        followed = [text[-1], *proposed]
        again = [*text, *proposed]  # a period goes on into its own copy
        places = range(len(text) - 1)
        assert any(again[i : i + len(followed)] == followed for i in places)


def test_generated_text_is_matched_like_the_prompt() -> None:
    lookup = drafter()
    lookup.start([DraftContext(0, PROMPT)])
    text = [1, 2, 3, 4, 5, 6, 7, 8] * 6
    assert replay(lookup, 0, text) <= 14


def test_candidates_are_trees_whatever_was_learnt() -> None:
    """Equal beginnings of several matches are one node, however the odds of the matches differ."""
    generator = torch.Generator().manual_seed(5)
    lookup = drafter(max_length=1024)
    rates = lookup._calibration.rates
    learnt = 0.5 + 0.48 * torch.rand(len(rates), generator=generator)
    lookup.start([DraftContext(row, torch.randint(3, (60,), generator=generator).tolist()) for row in range(4)])
    for _ in range(50):
        rates.copy_(learnt)
        assert_valid_tree(grow(lookup, range(4)))
        commit(lookup, dict(enumerate(torch.randint(3, (4, 2), generator=generator).tolist())))


def test_captured_it_proposes_and_learns_the_same() -> None:
    """One to four texts in any order, with steps between in which nobody is asked."""
    generator = torch.Generator().manual_seed(7)
    with kernels():
        eager, captured = drafter(128), drafter(128, record)
        for lookup in (eager, captured):
            contexts = [
                DraftContext(row, [*range(row, 9 + row)] * 2, prediction=[3, 4, 5, 6] * row) for row in range(4)
            ]
            lookup.start(contexts)
        for step in range(30):
            rows = torch.randperm(4, generator=generator)[: 1 + step % 4].tolist()
            if step % 5:
                one, other = grow(eager, rows), grow(captured, rows)
                assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
            emitted: dict[int, Sequence[int]] = {
                row: torch.randint(9, (1 + step % 3,), generator=generator).tolist() for row in rows
            }
            for lookup in (eager, captured):
                commit(lookup, emitted)
        assert eager.finish(range(4)) == captured.finish(range(4))
