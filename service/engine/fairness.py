"""Whose turn it is: how much each client was served, in tokens.

Every client has an account. Who is served most waits for the others to catch up, so that one that sends most of the
load slows the others no more than one that sends as much as they do ("virtual token counter", arXiv 2401.00588).
Accounts of those who are not here are kept only as far as they still say something.
"""

from collections import Counter
from collections.abc import Iterable

from service.engine.sequence import Sequence

PROMPT_SHARE = 0.5
"""What reading a token of a prompt counts, against 1 for generating one."""

_LEEWAY_TOKENS = 8.0


class Accounts:
    """Tokens served by client. One that was away is not owed what it did not ask for."""

    def __init__(self, *, leeway_tokens: float = _LEEWAY_TOKENS) -> None:
        self._leeway = leeway_tokens
        self._served: dict[str, float] = {}
        self._present: Counter[str] = Counter()  # sequences that wait or run

    def enter(self, client: str) -> None:
        """One more sequence of this client."""
        if not self._present:
            self._served = {client: 0.0}
        elif client not in self._present:
            least = min(self._served[other] for other in self._present)
            self._served = {who: count for who, count in self._served.items() if who in self._present or count > least}
            self._served[client] = max(least, self._served.get(client, least))
        self._present[client] += 1

    def leave(self, client: str) -> None:
        """One sequence less."""
        self._present[client] -= 1
        if not self._present[client]:
            del self._present[client]

    def settle(self, sequence: Sequence) -> None:
        """Put on its client's account what a running sequence was served since the last time."""
        served = service_of(sequence)
        # What is read again after a preemption is nobody's wish, hence never charged twice.
        self._served[sequence.client] += max(0.0, served - sequence.charged_tokens)
        sequence.charged_tokens = max(served, sequence.charged_tokens)

    def waive(self, sequence: Sequence) -> None:
        """What a sequence finds done already costs its client nothing."""
        sequence.charged_tokens = max(service_of(sequence), sequence.charged_tokens)

    def served(self, client: str) -> float:
        return self._served[client]

    def in_turn(self, clients: Iterable[str]) -> set[str]:
        """Of these clients those that are not ahead of the one served least."""
        among = set(clients)
        limit = min((self._served[client] for client in among), default=0.0) + self._leeway
        return {client for client in among if self._served[client] <= limit}


def service_of(sequence: Sequence) -> float:
    """Tokens a sequence has had, those of its prompt at their share."""
    return PROMPT_SHARE * min(sequence.num_computed, sequence.num_prompt) + sequence.num_generated
