"""How much each client was served, in tokens: who is admitted next, and whose prompt is read first.

Every client has a counter ("virtual token counter", arXiv 2401.00588). The client served least is admitted first and
gets the prompt chunk first; running sequences decode in every step, so that no counter makes the machine wait.
Counters of clients with nothing waiting or running are kept only while they are above the least of the others.
"""

from collections import Counter

from service.engine.sequence import Sequence

PROMPT_SHARE = 0.5
"""What reading a token of a prompt counts, against 1 for generating one."""


class Accounts:
    """Tokens served by client. A client that comes back is not owed what it did not ask for."""

    def __init__(self) -> None:
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


def service_of(sequence: Sequence) -> float:
    """Tokens a sequence has had, those of its prompt at their share."""
    return PROMPT_SHARE * min(sequence.num_computed, sequence.num_prompt) + sequence.num_generated
