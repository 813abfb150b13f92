"""From logits to what is accepted: each row's choice lands at its node, and only what lies on the path can fail."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from drafters.tree import DraftTree
from kernels.rows import ExtendRows, ForwardRows
from kernels.sample import gumbel_noise_of
from kernels.settle import Verified
from service.engine.emit import absorb
from service.engine.kv_pool import SlotPool, SlotTable
from service.engine.requests import SamplingParams, SequenceOutput
from service.engine.rows import RowLayout, committed_of
from service.engine.sequence import Finish, Sequence, TextStream
from service.engine.target import TargetOutput
from service.engine.verify import VerifyStage
from tests.service.engine.harness import alone, ask, generate, greedy, request, tiny_engine
from tests.service.engine.test_scheduler import TOKENIZER, sequence_of
from tests.service.engine.test_target import tree_of
from tests.tiny_models import EOS_ID, VOCAB_SIZE, random_prompts

VOCAB = 320
CPU = torch.device("cpu")
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
    """A finished sequence's memory is given to the next one: an address alone does not tell the two apart."""
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


# Slots around a forward: extends stay, accepted nodes join the table in order, everything else is free again.


class Step:
    """One forward of two sequences: one with a tree, one that reads its prompt."""

    def __init__(self, target_tokens: list[int]) -> None:
        self.slots, self.table = SlotPool(50, CPU), SlotTable(3, 40, CPU)
        tree = tree_of([11, 12, 13, 14, 15], [-1, -1, 1, 1, 3])
        both = DraftTree.concatenated([tree, DraftTree(*map(torch.zeros_like, tree))])
        extends = [ExtendRows(2, 7, [10], completes=True), ExtendRows(0, 3, [20, 21, 22], completes=False)]
        self.rows = RowLayout(self.slots, self.table)(extends, both)
        self.node_slots = self.rows.attention.node_slots[0, :5].tolist()
        self.logits = torch.randn(6, 100, generator=torch.Generator().manual_seed(0))
        self.logits[torch.arange(6), torch.tensor(target_tokens)] = 9.0
        verified = VerifyStage(self.table).verify([sequence_of(8, greedy())], self.rows, both, self.logits)
        output = TargetOutput(self.logits, torch.arange(self.rows.num_rows).float()[:, None])
        self.committed = committed_of(verified, both, output, wants_scores=True)
        self.slots.free(verified.freed[: 5 - int(verified.num_accepted)])


def test_accepted_nodes_join_the_table_and_become_permanent() -> None:
    """The path is node 1, node 3, node 4."""
    step = Step([12, 0, 14, 0, 15, 99])
    committed, path_slots = step.committed, [step.node_slots[node] for node in (1, 3, 4)]
    assert step.table.slots[2, 8:12].tolist() == [*path_slots, 0]
    assert step.slots.num_free == step.slots.capacity - 4 - 3
    assert not set(step.slots.free_slots().tolist()) & set(path_slots)
    assert (committed.rows.tolist(), committed.counts.tolist()) == ([2], [4])
    assert committed.tokens[0].tolist() == [12, 14, 15, 99, *[-1] * (committed.tokens.shape[1] - 4)]
    assert committed.features is not None
    rows = [step.rows.slots.tolist().index(slot) for slot in path_slots]
    assert committed.features[0, :4, 0].tolist() == [0, *rows]
    assert committed.logits is step.logits
    assert committed.chosen_by is not None
    assert committed.chosen_by[0, :4].tolist() == [0, 2, 4, 5]


# What a sequence keeps of a step's tokens, why it ends there, and what its last output says.

HELLO = TOKENIZER.encode("hello world")
EOS = frozenset({EOS_ID})


def writing(params: SamplingParams) -> Sequence:
    """A sequence that has not yet generated anything."""
    sequence = sequence_of(4, params)
    sequence.text = TextStream(TOKENIZER.detokenizer(True), params)
    sequence.row = 0
    return sequence


def params(max_tokens: int = 100, **fields: object) -> SamplingParams:
    return SamplingParams(seed=0, max_tokens=max_tokens, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sampling", "tokens", "kept", "finish"),
    [
        (params(), HELLO, len(HELLO), None),
        (params(3), HELLO, 3, Finish("length")),
        (params(), [*HELLO, EOS_ID, 5, 6], len(HELLO) + 1, Finish("stop")),
        (params(ignore_eos=True), [*HELLO, EOS_ID, 5, 6], len(HELLO) + 3, None),
        (params(stop_token_ids=frozenset({5})), [4, 5, 6], 2, Finish("stop", 5)),
        (params(stop_token_ids=frozenset({EOS_ID}), ignore_eos=True), [4, EOS_ID], 2, Finish("stop", EOS_ID)),
        (params(2, stop_token_ids=frozenset({5})), [4, 5, 6], 2, Finish("stop", 5)),
        (params(min_tokens=3, stop_token_ids=frozenset({5})), [5, 5, 5, 5, 5], 4, Finish("stop", 5)),
        (params(stop=("lo w",)), HELLO, None, Finish("stop", "lo w")),
        (params(stop=("nothing",)), HELLO, len(HELLO), None),
    ],
)
def test_a_sequence_keeps_tokens_up_to_its_end(
    sampling: SamplingParams, tokens: list[int], kept: int | None, finish: Finish | None
) -> None:
    sequence = writing(sampling)
    found, end = absorb(sequence, tokens, EOS)
    assert end == finish
    assert found == tokens[: len(found)] == sequence.tokens[4:]
    assert len(found) == kept if kept is not None else TOKENIZER.decode(found).endswith(("lo w", "lo wo"))


def test_a_prediction_that_comes_true_is_counted() -> None:
    (text,) = random_prompts(1, 30, seed=4)
    answer = alone(greedy(40), text).tokens
    right = request("right", text, greedy(40), prediction=answer)
    never = [token for token in range(VOCAB_SIZE) if token not in answer][:2]
    wrong = request("wrong", text, greedy(40), prediction=never * 10)
    results = generate(tiny_engine(drafter="memory"), right, wrong, request("none", text, greedy(40)))
    records = {name: result.end.speculation for (name, _), result in results.items()}
    counts = {n: (r.accepted_prediction_tokens, r.rejected_prediction_tokens) for n, r in records.items() if r}
    assert counts["wrong"] == (0, 20)
    assert counts["none"] == (0, 0)
    assert sum(counts["right"]) == 40
    assert counts["right"][0] > 20


def test_first_tokens_leave_one_by_one_where_that_is_asked_for() -> None:
    (text,) = random_prompts(1, 30, seed=4)
    params = SamplingParams(seed=0, max_tokens=40, temperature=0.0, num_logprobs=1)
    whole = alone(params, text)
    engine, outputs = tiny_engine(drafter="memory"), list[SequenceOutput]()
    ask(engine, replace(request("one", text, params, prediction=whole.tokens), single_token_outputs=20))
    while not engine.idle:
        outputs += engine.step().outputs
    lengths = [len(output.token_ids) for output in outputs]
    assert lengths[:20] == [1] * 20
    assert max(lengths[20:]) > 1  # steps bring more
    assert [token for output in outputs for token in output.token_ids] == whole.tokens
    assert "".join(output.text for output in outputs) == whole.text
    shown = [logprob for output in outputs for logprob in output.logprobs or ()]
    assert [logprob.token_id for logprob in shown] == whole.tokens
    assert all(len(output.logprobs or ()) == length for output, length in zip(outputs, lengths, strict=True))
    assert [output.finish_reason for output in outputs if output.finish_reason is not None] == ["length"]
