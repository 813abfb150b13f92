"""From logits to what is accepted: each row's choice lands at its node, and only what lies on the path can fail."""

import pytest
import torch
from torch import Tensor

from drafters.tree import DraftTree
from kernels.rows import ExtendRows, ForwardRows
from kernels.sample import gumbel_noise_of
from kernels.settle import Verified
from service.engine.kv_pool import SlotPool, SlotTable
from service.engine.requests import SamplingParams
from service.engine.rows import RowLayout
from service.engine.sequence import Sequence
from service.engine.verify import VerifyStage
from tests.service.engine.harness import greedy
from tests.service.engine.test_scheduler import sequence_of
from tests.service.engine.test_target import tree_of

torch.set_num_threads(1)

VOCAB, CPU = 320, torch.device("cpu")
PARENTS = [-1, -1, 1, 1, 3]
DRAFTED = [11, 12, 13, 14, 15]
ON_PATH = {-1: 12, 1: 14, 3: 15, 4: 99}  # what the target chooses after the root (-1) and after some nodes


def forward(others: int = 1) -> tuple[list[Sequence], ForwardRows, DraftTree]:
    """A sequence with a tree beside others that read their prompts to the end, or not."""
    lines = [sequence_of(8, greedy()), *(sequence_of(3, greedy()) for _ in range(others))]
    extends = [ExtendRows(2, 7, [2], completes=True)]
    extends += [ExtendRows(3 + number, 0, [2, 2, 2], completes=number % 2 == 1) for number in range(others)]
    tree = tree_of(DRAFTED, PARENTS)
    padding = DraftTree(*(value.new_zeros(others, *value.shape[1:]) for value in tree))
    both = DraftTree.concatenated([tree, padding])
    rows = RowLayout(SlotPool(100, CPU), SlotTable(16, 40, CPU))(extends, both)
    return [line for line, extend in zip(lines, extends, strict=True) if extend.completes], rows, both


def stage() -> VerifyStage:
    return VerifyStage(SlotTable(16, 40, CPU))


def logits_for(rows: ForwardRows, choices: dict[int, int]) -> Tensor:
    """Logits under which the first sequence's rows choose these tokens, and all others token 50."""
    logits = torch.zeros(rows.logit_rows.shape[0], VOCAB)
    for line, (sequence, row) in enumerate(zip(rows.logit_sequence.tolist(), rows.logit_rows.tolist(), strict=True)):
        node = int(rows.attention.node[row])
        logits[line, choices.get(node, 70 + node) if sequence == 0 else 50] = 9.0
    return logits


def verify(choices: dict[int, int], *bad: int, others: int = 1) -> tuple[Verified, ForwardRows]:
    """Verify with not-a-number logits after the nodes `bad` of the first sequence."""
    sequences, rows, tree = forward(others)
    logits = logits_for(rows, choices)
    nodes = rows.attention.node[rows.logit_rows]
    for node in bad:
        logits[(nodes == node) & (rows.logit_sequence == 0)] = torch.nan
    return stage().verify(sequences, rows, tree, logits), rows


@pytest.mark.parametrize("others", [0, 1, 2, 3])
def test_the_path_is_walked_as_far_as_the_target_agrees(others: int) -> None:
    result, _ = verify(ON_PATH, others=others)
    assert result.path[0][result.path[0] >= 0].tolist() == [1, 3, 4]
    assert result.num_accepted.tolist() == [3, *[0] * (others // 2)]
    assert result.bonus.tolist() == [99, *[50] * (others // 2)]
    assert result.target_tokens[0].tolist() == [12, 70, 14, 72, 15, 99]


@pytest.mark.parametrize("node", [-1, 1, 3, 4])
def test_no_score_on_the_path_fails_the_sequence(node: int) -> None:
    assert verify(ON_PATH, node, others=2)[0].emitted[:, 0].tolist() == [True, False]


def test_no_score_beside_the_path_is_harmless() -> None:
    verified, _ = verify(ON_PATH, 0, 2, others=2)
    assert verified.emitted[:, 0].tolist() == [False, False]
    assert verified.num_accepted.tolist() == [3, 0]


def test_positions_and_counts_rise_along_the_path() -> None:
    """With min_tokens 2 the stop token is out of reach after the root and at depth 1, but not below."""
    sequences, rows, tree = forward(0)
    params = SamplingParams(seed=0, max_tokens=50, temperature=0.0, min_tokens=2, stop_token_ids=frozenset({60}))
    sequences = [sequence_of(8, params)]
    logits = logits_for(rows, ON_PATH)
    logits[:, 60] = 10.0
    target_tokens = stage().verify(sequences, rows, tree, logits).target_tokens
    assert target_tokens.tolist() == [[12, 70, 14, 60, 60, 60]]


def test_a_new_sequence_in_an_old_ones_place_samples_its_own_way() -> None:
    """A finished sequence's memory is given to the next one, so that the two cannot be told apart by their address."""
    one, (_, rows, tree) = stage(), forward(0)
    logits = logits_for(rows, ON_PATH)
    logits[:, 61] = 5.0
    addresses = set()
    for forbidden in (12, 14) * 20:
        params = SamplingParams(seed=0, max_tokens=50, temperature=0.0, logit_bias=((forbidden, -100.0),))
        sequence = sequence_of(8, params)
        addresses.add(id(sequence))
        chosen = one.verify([sequence], rows, tree, logits).target_tokens[0]
        assert int(chosen[0]) == (61 if forbidden == 12 else 12)
        assert int(chosen[2]) == (61 if forbidden == 14 else 14)
        del sequence
    assert len(addresses) < 40


def test_noise_belongs_to_the_position_of_the_chosen_token() -> None:
    """Under flat logits the noise alone chooses: the same for siblings, another one at every depth."""
    _, rows, tree = forward(0)
    params = SamplingParams(seed=77, max_tokens=50, temperature=1.0)
    logits = torch.zeros(rows.logit_rows.shape[0], VOCAB)
    chosen = stage().verify([sequence_of(8, params)], rows, tree, logits).target_tokens[0]
    positions = 8 + torch.tensor([0, 1, 1, 2, 2, 3])  # the root stands at 7, the nodes at depths 1, 1, 2, 2, 3
    noise = gumbel_noise_of(torch.full((6,), 77), positions, torch.arange(VOCAB))
    assert torch.equal(chosen, noise.argmax(1))
    assert len(set(chosen.tolist())) == 4
