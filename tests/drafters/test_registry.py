import pytest

from drafters.protocol import Drafter
from drafters.registry import DraftingSizes, build_drafter

SIZES = DraftingSizes(max_sequences=2, max_length=64, vocab_size=100, num_slots=80, max_nodes=8)


def build(name: str) -> Drafter:
    return build_drafter(name, SIZES, device="cpu")


@pytest.mark.parametrize("name", ["lookup", "none", "random"])
def test_a_drafter_answers_to_its_name(name: str) -> None:
    drafter = build(name)
    assert drafter.name == name
    assert drafter.tap_layers == ()
    assert drafter.trainable() is None


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown drafter 'eagle': choose one of lookup, none, random"):
        build("eagle")
