"""The weights that are served here, as bytes and by hash: the name under which all replicas know them.

Equal weights have equal bytes, so that two replicas serve the same if and only if their hashes are equal.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import safetensors
import safetensors.torch
from torch import Tensor

from adaptation.checkpoint import Layout, layout_of
from adaptation.records import Refused
from adaptation.trainer import all_finite
from adaptation.weights import DrafterWeights
from drafters.specblock.weights import VOCABULARY, names_tokens

_REMEMBERED = 256  # versions


@dataclass(frozen=True, slots=True)
class Served:
    """One version of this process."""

    version: int
    sha256: str
    data: bytes


class ServedWeights:
    """Looks at the weights from outside, and hashes each version once. To be asked by one thread."""

    def __init__(self, weights: DrafterWeights) -> None:
        self._weights = weights
        self._hashes: dict[int, str] = {}
        self._now = self._look()

    @property
    def last_seen(self) -> Served:
        """As it was when `now` was asked last; from any thread."""
        return self._now

    def now(self) -> Served:
        """What is served, or on its way to be."""
        if self._weights.latest()[0] != self._now.version:
            self._now = self._look()
        return self._now

    def sha256_of(self, version: int) -> str:
        """Empty for a version that was not seen, or long ago."""
        return self._hashes.get(version, "")

    def version_of(self, sha256: str) -> int:
        """The version that is served, if it has these weights; else one that there never was."""
        return self._now.version if sha256 == self._now.sha256 else -1

    def _look(self) -> Served:
        version, weights = self._weights.latest()
        data = weights_as_bytes(weights)
        digest = hashlib.sha256(data).hexdigest()
        self._hashes[version] = digest
        for old in sorted(self._hashes)[:-_REMEMBERED]:
            del self._hashes[old]
        return Served(version, digest, data)


def weights_as_bytes(weights: Mapping[str, Tensor]) -> bytes:
    return safetensors.torch.save({name: value.detach().cpu().contiguous() for name, value in weights.items()})


def weights_from_bytes(data: bytes, sha256: str, layout: Layout, vocab: int) -> dict[str, Tensor]:
    """Raises Refused unless every bit is as announced and the weights could be served. `vocab`: the target's tokens"""
    if hashlib.sha256(data).hexdigest() != sha256:
        raise Refused("torn", f"weights that do not have the hash {sha256[:16]} they were announced with")
    try:
        weights = safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        raise Refused("misfit", f"announced weights hold no tensors: {error}") from error
    if layout_of(weights) != dict(layout):
        raise Refused("misfit", "announced weights do not have the names, shapes and types of this drafter's")
    if not all_finite(weights.values()):
        raise Refused("not_finite", "announced weights")
    if not names_tokens(weights[VOCABULARY], vocab):
        raise Refused("misfit", "announced weights are for tokens that the target does not have, or for one twice")
    return weights
