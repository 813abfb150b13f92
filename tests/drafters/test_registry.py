import pytest
import torch

from drafters.protocol import Drafter, DraftingSizes, Noise
from drafters.registry import NoDrafter, build_drafter, sources_of

SIZES = DraftingSizes(max_sequences=2, max_length=64, vocab_size=100, num_slots=80, max_nodes=8)


def build(name: str) -> Drafter:
    return build_drafter(name, SIZES)


@pytest.mark.parametrize("name", ["lookup", "lookahead", "none", "random", "switch(lookup,lookahead)"])
def test_a_drafter_answers_to_its_name(name: str) -> None:
    drafter = build(name)
    assert drafter.name == name
    assert drafter.tap_layers == ()


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown drafter 'eagle': choose one of lookahead, lookup, none, random"):
        build("eagle")


@pytest.mark.parametrize("name", ["switch(lookup)", "switch(lookup,eagle)", "switch(,lookup)"])
def test_a_switch_between_unknown_ones_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="unknown drafter"):
        build(name)


def test_tokens_are_credited_to_parts() -> None:
    assert sources_of("lookahead") == ("lookahead",)
    assert sources_of("lookup+specblock") == sources_of("switch(lookup,specblock)") == ("lookup", "specblock")
    assert sources_of("switch(random,lookup+specblock)") == ("random", "lookup+specblock")


def test_without_a_drafter_the_tree_is_empty() -> None:
    rows = torch.tensor([3, 1])
    candidates = NoDrafter().grow(rows, Noise(torch.zeros(2), torch.zeros(2), torch.zeros(2)))
    assert candidates.tokens.shape == (2, 0)
    assert candidates.num_nodes.tolist() == [0, 0]
    assert NoDrafter().finish([3, 1]) == [0, 0]
