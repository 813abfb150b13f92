"""What a sequence keeps of a step's tokens, why it ends there, and what its last output says."""

from dataclasses import replace

import pytest
import torch

from service.engine.emit import absorb
from service.engine.requests import SamplingParams, SequenceOutput
from service.engine.sequence import Finish, Sequence, TextStream
from tests.service.engine.harness import alone, generate, greedy, request, tiny_engine
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
