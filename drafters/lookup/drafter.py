"""The lookup drafter: copies what followed the same words earlier in the prompt, the answer so far, or the answer the
client predicted, and proposes several such continuations as one tree. It learns from every committed token.
Legend: batch; sequences = rows; matches, reach as in kernels/lookup.py."""

from collections.abc import Sequence

import torch
from torch import Tensor

from drafters.calibration import MIN_SURVIVAL
from drafters.lookup.calibration import ABSENT, MAX_MATCHES, REACH, LookupCalibration
from drafters.lookup.history import History
from drafters.proposals import Field, ProposalLog
from drafters.protocol import Committed, DraftContext, Drafter, DraftingSizes, Noise
from drafters.tree import MAX_DEPTH, ROOT, Candidates, DraftTree
from kernels import ops
from kernels.graph_runner import by_batch
from kernels.lookup import CONTEXT, PREDICTED, SEPARATOR

_SPARE_COLUMNS = 2  # the end of the text, which matches only itself, and the last one, which nothing follows


class LookupDrafter(Drafter):
    """Drafts by copying; keeps the texts and the last proposals of all rows on the device. Captured, all columns of a
    text are looked through."""

    name = "lookup"

    def __init__(self, sizes: DraftingSizes) -> None:
        device = sizes.device
        self._history = History(sizes.max_sequences, sizes.max_length, device, is_fixed=sizes.capture is not None)
        self._calibration = LookupCalibration(device=device)
        self._max_nodes = sizes.max_nodes
        # All continuations as nodes (depth, match); equal beginnings are not merged here.
        nodes = torch.arange((REACH + 1) * MAX_MATCHES, device=device)
        self._depths, self._parents = nodes // MAX_MATCHES + 1, (nodes - MAX_MATCHES).clamp(min=ROOT)
        fields = {
            "tokens": Field((REACH + 1, MAX_MATCHES), SEPARATOR),
            "buckets": Field((REACH, MAX_MATCHES), ABSENT, forgotten=True),
            "strengths": Field((MAX_MATCHES,), 0, forgotten=True),
        }
        self._proposals = ProposalLog(sizes, fields)
        self._predicted = torch.zeros(sizes.max_sequences + 1, dtype=torch.int64, device=device)
        self._ops = ops.on(self._predicted.device)
        self._has_proposed = False  # since the last commit: without, there is nothing to learn from the next one
        most, capture = sizes.max_sequences, sizes.capture
        nobody = torch.full((most,), most, device=device)
        counts, nothing = torch.zeros_like(nobody), nobody.new_full((most, MAX_DEPTH + 1), SEPARATOR)
        self._propose = by_batch(self._run_propose, capture, most, (nobody, counts.float(), self._history.width))
        committed = ((nobody, nothing, counts, learns) for learns in (True, False))
        self._take_in = by_batch(self._run_take_in, capture, most, *committed)

    def start(self, contexts: Sequence[DraftContext]) -> None:
        self._history.start(contexts)
        rows = torch.tensor([context.row for context in contexts], dtype=torch.int64, device=self._predicted.device)
        self._proposals.forget(rows)
        self._predicted[rows] = 0

    def grow(self, rows: Tensor, noise: Noise) -> Candidates:
        self._has_proposed = True
        columns = self._history.columns(CONTEXT + MAX_MATCHES + _SPARE_COLUMNS)
        return self._propose((rows, noise.temperatures, columns)).first(rows.shape[0])

    def commit(self, committed: Committed) -> None:
        self._take_in((committed.rows, committed.tokens, committed.counts, self._has_proposed))
        self._has_proposed = False

    def finish(self, rows: Sequence[int]) -> list[int]:
        self._history.finish(rows)
        predicted: list[int] = self._predicted[list(rows)].tolist()  # planned transfer
        return predicted

    def _run_propose(self, rows: Tensor, temperatures: Tensor, columns: int) -> DraftTree:
        matches = self._ops.find_matches(self._history.texts, rows, columns, MAX_MATCHES, REACH)
        evidence = self._calibration.evidence
        tree, buckets = self._ops.merge_copies(matches, temperatures, evidence, self._max_nodes, MIN_SURVIVAL)
        self._proposals.keep(rows, tokens=matches.continuations, buckets=buckets, strengths=matches.strengths)
        return tree

    def _run_take_in(self, rows: Tensor, tokens: Tensor, counts: Tensor, learns: bool) -> tuple[()]:
        if learns:
            self._learn(rows, tokens, counts)
        self._history.append(rows, tokens, counts)
        return ()

    def _learn(self, rows: Tensor, committed: Tensor, counts: Tensor) -> None:
        tokens, strengths, buckets = self._proposals.of(rows, "tokens", "strengths", "buckets")
        parents, depths = (of_node.expand(len(rows), -1) for of_node in (self._parents, self._depths))
        fates = self._ops.fates(tokens.flatten(1), parents, depths, committed, counts)
        tried, came_true = (fate.view(tokens.shape) for fate in fates)
        predicted = came_true & (strengths >= PREDICTED)[:, None]
        self._predicted.index_add_(0, rows, predicted.any(2).sum(1))
        self._calibration.observe(buckets, came_true[:, :REACH], tried[:, :REACH])
        self._proposals.forget(rows)
