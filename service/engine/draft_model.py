"""The language model that drafts: it is loaded as targets are, and refused where its tokens are not the target's."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from service.engine.kv_pool import KVPool
from service.engine.target import Target
from service.engine.weights import LoadedModel
from service.errors import StartupError

_TRIAL_SLOTS = 16  # of the pool with which the model is taken over; each drafter has its own


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A model that drafts; its pool is each drafter's own."""

    model: Target
    fingerprint: str  # of its weights


def taken_over(loaded: LoadedModel, target: LoadedModel, *, name: str, max_model_len: int) -> DraftModel:
    """Takes over a model that is to draft for the target. Raises StartupError where it cannot."""
    difference = tokens_differ(target.tokenizer, loaded.tokenizer)
    if difference is not None:
        raise StartupError(
            f"the draft model {name} has another tokenizer than the target: {difference}; set drafter_path to a model "
            "of the target's family"
        )
    if loaded.max_positions < max_model_len:
        raise StartupError(
            f"the draft model {name} was made for {loaded.max_positions} tokens: set max_model_len to no more"
        )
    pool = KVPool(loaded.kv_shape, _TRIAL_SLOTS, loaded.model.device)
    return DraftModel(Target(loaded.model, pool, in_8_bits=loaded.in_8_bits), loaded.fingerprint)


def tokens_differ(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> str | None:
    """How the draft model's tokens are others than the target's, by content; None: they are the same. What a tokenizer
    calls the end of a text may differ: the target alone says where its answers end."""
    ours, theirs = _contents(target), _contents(draft)
    for part in ours:
        one, other = ours[part], theirs[part]
        place = next((key for key in {**one, **other} if one.get(key) != other.get(key)), None)
        if place is not None:
            said = (repr(found[place]) if place in found else "none" for found in (one, other))
            return f"{part} {place} is {next(said)} for the target and {next(said)} for the draft model"
    return None


def _contents(tokenizer: PreTrainedTokenizerBase) -> dict[str, Mapping[int, object]]:
    """Vocabulary, merges and special tokens, each by number."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model: Mapping[str, Any] = json.loads(backend.to_str())["model"] if backend is not None else {}
    special = {id_: str(token) for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
    return {
        "token": {id_: token for token, id_ in sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])},
        "merge": dict(enumerate(model.get("merges") or ())),
        "special token": special,
    }
