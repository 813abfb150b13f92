"""What a sequence keeps of a step's tokens, why it ends there, and what its last output says."""

from collections.abc import Sequence as Items
from dataclasses import replace
from typing import cast

import pytest
import torch

from drafters.protocol import Committed
from drafters.registry import NoDrafter
from drafters.tree import DraftTree
from kernels.settle import Verified
from service.engine.emit import EmitStage, StepResult, absorb, mark_emitted, read_result
from service.engine.requests import SamplingParams, SequenceOutput
from service.engine.sequence import Finish, Sequence, TextStream
from tests.service.engine.harness import alone, budget_of, generate, greedy, load_of, request, tiny_engine
from tests.service.engine.test_scheduler import TOKENIZER, sequence_of
from tests.tiny_models import EOS_ID, VOCAB_SIZE, random_prompts

torch.set_num_threads(1)

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


def emit(sequence: Sequence, tokens: Items[int], *, failed: bool = False, drafts: bool = True) -> SequenceOutput:
    """One step's output for one sequence, all of whose drafted tokens were accepted."""
    count = len(tokens) - 1
    emitted, one = torch.tensor([tokens]), torch.tensor([0])
    nowhere = torch.zeros_like(emitted)
    verified = Verified(
        path=torch.arange(count)[None],
        num_accepted=torch.tensor([count]),
        bonus=emitted[:, -1],
        target_tokens=nowhere,
        tokens=emitted,
        emitted=torch.tensor([[failed, *tokens]]),
        counts=torch.tensor([count + 1]),
        path_logits=torch.arange(count + 1)[None],
        path_rows=nowhere,
        slots=nowhere,
        table_rows=one,
        roots=one,
        freed=nowhere[0],
    )
    removed: list[Sequence] = []
    lines, have_failed, _ = read_result(verified)
    budget = budget_of(load_of(int(drafts)), [count], "fixed")
    tree, logits = DraftTree.empty(1), torch.zeros(count + 1, 320)
    committed = cast(Committed, None)  # which concerns the drafter
    result = StepResult(tree, budget, verified, committed, logits, lines, have_failed)
    (output,) = EmitStage(NoDrafter(), EOS).emit(sequence, 0, result, removed.append)
    assert removed == ([] if output.finish_reason is None else [sequence])
    return output


def test_text_that_may_become_a_stop_is_held_back_until_it_does_not() -> None:
    sequence = writing(params(stop=("world!",)))
    first = emit(sequence, HELLO)
    assert first.text == "hello "
    second = emit(sequence, TOKENIZER.encode("?"))
    assert second.text == "world?"
    assert first.finish_reason is second.finish_reason is None


def test_the_last_output_has_the_rest_of_the_text_and_the_totals() -> None:
    sequence = writing(params(len(HELLO), stop=("world!",)))
    output = emit(sequence, HELLO)
    assert (output.text, output.finish_reason) == ("hello world", "length")
    assert output.speculation is not None
    assert output.timings is not None


def test_a_failed_sequence_keeps_nothing() -> None:
    sequence = writing(params(num_logprobs=2))
    output = emit(sequence, HELLO, failed=True)
    assert (output.token_ids, output.text, output.logprobs, output.finish_reason) == ((), "", (), "error")
    assert output.error is not None
    assert sequence.tokens == [2] * 4


def test_logprobs_stand_beside_the_kept_tokens_only() -> None:
    output = emit(writing(params(2, num_logprobs=0)), [7, 8, 9])
    assert output.logprobs is not None
    assert [shown.token_id for shown in output.logprobs] == [7, 8] == list(output.token_ids)
    assert all(shown.top == () for shown in output.logprobs)
    silent = emit(writing(params(2)), [7, 8, 9])
    assert silent.logprobs is None


@pytest.mark.parametrize(
    ("sampling", "accepted"),
    [(params(), 4), (params(stop=("llo",)), 3), (params(stop_token_ids=frozenset(HELLO[:1])), 0)],
)
def test_tokens_after_a_stop_were_not_accepted(sampling: SamplingParams, accepted: int) -> None:
    """Of five tokens, four of them drafted, those are counted that the answer has, the step's own one among them."""
    sequence = writing(sampling)
    output = emit(sequence, HELLO[:5])
    assert (sequence.accepted_per_step, sequence.drafted_per_step) == ([accepted], [4])
    assert len(output.token_ids) == 1 + accepted


def test_a_token_from_reading_a_prompt_is_no_verification() -> None:
    sequence = writing(params())
    emit(sequence, HELLO[:1], drafts=False)
    assert (sequence.accepted_per_step, sequence.drafted_per_step) == ([], [])


def test_the_first_emission_is_no_gap() -> None:
    sequence = writing(params())
    assert mark_emitted(sequence, 1.0) is None
    assert mark_emitted(sequence, 1.5) == 0.5


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
    engine.add(replace(request("one", text, params, prediction=whole.tokens), single_token_outputs=20))
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
