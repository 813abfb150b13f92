"""Requests that ask are told of every tree that was verified for them, and get the same text."""

from dataclasses import replace

import pytest

from service.engine.requests import GenerationRequest, SequenceOutput, SpeculationParams
from tests.service.engine.harness import alone, greedy, request, sampled, tiny_engine
from tests.tiny_models import random_prompts

TRACE = SpeculationParams(trace=True)


def outputs_of(*requests: GenerationRequest) -> dict[str, list[SequenceOutput]]:
    engine = tiny_engine(drafter="memory")
    for one in requests:
        engine.add(one)
    outputs: dict[str, list[SequenceOutput]] = {one.request_id: [] for one in requests}
    while not engine.idle:
        for output in engine.step().outputs:
            outputs[output.request_id].append(output)
    return outputs


@pytest.fixture(scope="module")
def requests() -> list[GenerationRequest]:
    """Greedy and sampled ones in turn, whose answers are predicted, but for every seventh token."""
    asked = []
    for i, text in enumerate(random_prompts(4, 20)):
        params = sampled(i) if i % 2 else greedy()
        answer = alone(params, text).tokens
        predicted = [token if place % 7 else 0 for place, token in enumerate(answer)]
        asked.append(request(str(i), text, params, prediction=predicted))
    return asked


def test_the_trees_account_for_every_token(requests: list[GenerationRequest]) -> None:
    for outputs in outputs_of(*(replace(one, speculation=TRACE) for one in requests)).values():
        trees = [output.tree for output in outputs if output.tree is not None]
        assert len(trees) == len(outputs)
        for output, tree in zip(outputs, trees, strict=True):
            above = [-1, *tree.path]
            assert [tree.parents[place] for place in tree.path] == above[: len(tree.path)]
            assert [tree.tokens[place] for place in tree.path] == list(output.token_ids[: len(tree.path)])
            assert all(parent < place for place, parent in enumerate(tree.parents))
            assert len(tree.survival) == len(tree.tokens)
        record = outputs[-1].speculation
        assert record is not None
        assert [len(tree.path) for tree in trees[1:]] == list(record.accepted_per_step)
        assert [len(tree.tokens) for tree in trees[1:]] == list(record.drafted_per_step)
        assert 0 < sum(record.accepted_per_step) < sum(record.drafted_per_step)


def test_being_told_changes_no_token(requests: list[GenerationRequest]) -> None:
    traced = outputs_of(*(replace(one, speculation=TRACE) if i < 2 else one for i, one in enumerate(requests)))
    plain = outputs_of(*requests)
    for name, outputs in plain.items():
        told = traced[name]  # in other steps, maybe: what is shown is drafted from the text alone
        assert sum((output.token_ids for output in told), ()) == sum((output.token_ids for output in outputs), ())
        assert "".join(output.text for output in told) == "".join(output.text for output in outputs)
        assert {output.tree for output in outputs} == {None}
    assert {output.tree for output in traced["3"]} == {None}
