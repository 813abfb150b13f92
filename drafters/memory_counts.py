"""Metrics record of a drafter's memory of past answers; a module of its own that does not import torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCounts:
    """Size of the memory of past answers, and its use since the start."""

    reserved_bytes: int  # size of the table of past answers
    used_share: float = 0.0  # share of its entries in use, 0 to 1, estimated from a sample
    remembered_tokens: int = 0  # generated tokens added to it
    known_tokens: tuple[int, ...] = ()
    """Generated tokens that past answers predicted, by the longest matching context (see `ORDERS`)."""
    evicted_scopes: int = 0  # number of scopes whose share another scope took
    forgotten_shares: int = 0  # number of shares cleared on request
