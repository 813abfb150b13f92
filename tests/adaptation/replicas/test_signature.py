import pytest
from pydantic import JsonValue

from adaptation.records import Refused
from adaptation.replicas.signature import NoSecret, SharedSecret, Signature, opened, signed

OURS, THEIRS = SharedSecret("the secret of ours"), SharedSecret("the secret of others")
CONTENT: dict[str, JsonValue] = {"version": 3, "scores": [0.5, 1.5], "name": "ä"}


@pytest.mark.parametrize("signature", [OURS, NoSecret()], ids=["secret", "none"])
def test_what_was_signed_is_opened(signature: Signature) -> None:
    assert opened("version", signed("version", CONTENT, signature), signature) == CONTENT


@pytest.mark.parametrize(
    "raw",
    [
        signed("version", CONTENT, THEIRS),
        signed("version", CONTENT, NoSecret()),
        signed("state", CONTENT, OURS),  # a signature for one kind of thing is none for another
        signed("version", CONTENT, OURS).replace(b"3", b"4", 1),
        b"",
        b"\xff\xfe",
        b"no signature",
    ],
)
def test_without_the_secret_nothing_is_opened(raw: bytes) -> None:
    with pytest.raises(Refused) as refused:
        opened("version", raw, OURS)
    assert refused.value.reason == "forged"


def test_every_bit_counts_even_without_a_secret() -> None:
    raw = signed("version", CONTENT, NoSecret())
    for place in range(1, len(raw)):
        altered = bytearray(raw)
        altered[place] ^= 1
        with pytest.raises(Refused) as refused:
            opened("version", bytes(altered), NoSecret())
        assert refused.value.reason == "torn"
