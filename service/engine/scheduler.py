"""Which sequences take part in the next step, and with how many rows.

Decoding sequences take part in every step. Prompts are read in chunks beside them, first come first served, so that a
long prompt delays the others by one chunk at most. When slots run out, the youngest sequence gives its slots back
and waits; its text is computed again later, to the same bits.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kernels.tree_attention import MAX_NODES
from service.engine.generation import Sequence
from service.engine.rows import Chain
from service.engine.slots import SlotPool, SlotTable


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A sequence's share of a step: its next pending tokens."""

    sequence: Sequence
    chain: Chain

    @staticmethod
    def of(sequence: Sequence, num_rows: int) -> "Scheduled":
        first = sequence.num_computed
        tokens = sequence.tokens[first : first + num_rows]
        return Scheduled(sequence, Chain(sequence.table_row, first, tokens, num_rows == sequence.num_pending))

    @property
    def num_rows(self) -> int:
        return len(self.chain.tokens)

    @property
    def completes(self) -> bool:
        """Whether the step reaches the end of the text, and so chooses the next token."""
        return self.chain.completes

    @property
    def drafts(self) -> bool:
        """Whether a draft tree may hang below it."""
        return self.num_rows == 1 and self.completes


@dataclass(frozen=True, slots=True)
class Batch:
    """Everyone who takes part in a step; the drafting sequences stand first."""

    items: list[Scheduled]
    started: list[Sequence]  # those that have just begun, or begun again, to run

    @property
    def drafting(self) -> list[Sequence]:
        return [item.sequence for item in self.items if item.drafts]

    @property
    def completing(self) -> list[Sequence]:
        return [item.sequence for item in self.items if item.completes]

    @property
    def chains(self) -> list[Chain]:
        """Each item's tokens of this step."""
        return [item.chain for item in self.items]

    @property
    def num_chain_rows(self) -> int:
        """Rows that run whatever the budget."""
        return sum(item.num_rows for item in self.items)


class Scheduler:
    """Owner of the waiting line and of the set of running sequences, oldest first."""

    def __init__(
        self,
        slots: SlotPool,
        table: SlotTable,
        *,
        prefill_chunk: int,
        released: Callable[[Sequence], None] = lambda sequence: None,
    ) -> None:
        """`released` hears of every sequence that stops running, finished or preempted, while it still has its row."""
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._slots = slots
        self._table = table
        self._prefill_chunk = prefill_chunk
        self._released = released
        self._preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence at the end of the waiting line."""
        self.waiting.append(sequence)

    def schedule(self) -> Batch:
        """The next step's sequences."""
        self._preempt_until_decoding_fits()
        started = self._admit(self._slots.num_free - self._num_decoding())
        decoding = [Scheduled.of(sequence, 1) for sequence in self.running if sequence.num_pending == 1]
        return Batch(decoding + self._chunks(self._slots.num_free - len(decoding)), started)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, whether waiting or running, and free its slots."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._release(sequence)

    def _preempt_until_decoding_fits(self) -> None:
        """Every decoding sequence needs one slot now; the oldest can always be served, because start-up checked that
        the pool holds the longest sequence."""
        while self._num_decoding() > self._slots.num_free:
            self.preempt(self.running[-1])
        if len(self.running) > 1 and self._slots.num_free == 0:
            self.preempt(self.running[-1])

    def _num_decoding(self) -> int:
        return sum(sequence.num_pending == 1 for sequence in self.running)

    def preempt(self, sequence: Sequence) -> None:
        """Send a running sequence back to the head of the waiting line."""
        self.running.remove(sequence)
        self._release(sequence)
        sequence.num_computed = 0
        self._preemptions += 1
        self.waiting.appendleft(sequence)

    def take_preemptions(self) -> int:
        """Preemptions since the last call."""
        count, self._preemptions = self._preemptions, 0
        return count

    def _release(self, sequence: Sequence) -> None:
        self._released(sequence)
        self._slots.free(self._table.release_row(sequence.table_row, sequence.num_computed))
        sequence.row = None

    def _admit(self, free: int) -> list[Sequence]:
        """Start waiting sequences while table lines are free and their text and one tree fit beside what runs."""
        started = []
        claimed = sum(sequence.num_pending for sequence in self.running if sequence.num_pending > 1)
        while self.waiting and self._table.num_free_rows:
            claimed += len(self.waiting[0].tokens) + MAX_NODES
            if self.running and claimed > free:
                break
            sequence = self.waiting.popleft()
            sequence.row = self._table.take_row()
            sequence.mark_started()
            self.running.append(sequence)
            started.append(sequence)
        return started

    def _chunks(self, free: int) -> list[Scheduled]:
        """Share out one chunk of prompt rows among the sequences that are still reading theirs."""
        left = min(self._prefill_chunk, free)
        chunks = []
        for sequence in self.running:
            num_rows = min(sequence.num_pending, left)
            if sequence.num_pending > 1 and num_rows > 0:
                chunks.append(Scheduled.of(sequence, num_rows))
                left -= num_rows
        return chunks
