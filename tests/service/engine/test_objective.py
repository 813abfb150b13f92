"""What a token counts: the same for all, or more for those behind their pace."""

import torch

from service.engine.objective import Latency, Throughput
from service.engine.sequence import Sequence
from tests.service.engine.test_scheduler import sequence_of

CPU = torch.device("cpu")


def generating(tokens: int, first_token_seconds: float | None) -> Sequence:
    sequence = sequence_of(4)
    sequence.tokens = [2] * (4 + tokens)
    sequence.first_token_seconds = first_token_seconds
    return sequence


def test_throughput_weighs_nobody() -> None:
    assert Throughput().weights([generating(3, 0.0)], CPU) is None


def test_latency_weighs_those_behind_their_pace() -> None:
    objective = Latency(0.1, clock=lambda: 10.0)
    sequences = [
        generating(0, None),  # still reads its prompt
        generating(100, 5.0),  # twice as fast as promised
        generating(10, 8.0),  # due after 1 s, and 2 s have passed
        generating(2, 0.0),  # hopelessly late
    ]
    weights = objective.weights(sequences, CPU)
    assert weights is not None
    assert weights.tolist() == [1.0, 1.0, 2.0, 4.0]
