"""Record of a drafter's memory of past answers, for metrics; without tensors."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCounts:
    """Room for past answers, and its use since the start."""

    reserved_bytes: int  # size of the table of past answers
    used_share: float = 0.0  # share of its places in use, 0 to 1, by a sample
    remembered_tokens: int = 0
    known_tokens: tuple[int, ...] = ()
    """Generated tokens that remembered answers had, by the longest context (`ORDERS`)."""
    evicted_scopes: int = 0  # number of scopes whose share another scope took
    forgotten_shares: int = 0  # number of shares deleted on request
