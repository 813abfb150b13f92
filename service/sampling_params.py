"""Sampling parameters of a request, declared once: as every generating route accepts them, and as the engine reads
them. To add one, give it a line in both classes and use it in `service/engine/sampling.py`; the table in docs/api.md is
made from this module."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

_MAX_STOPS = 16
_MAX_STOP_CHARACTERS = 1024
_MAX_NAMED_TOKENS = 1024
# Dividing logits by a lower temperature exceeds the sampler's number range.
_LOWEST_TEMPERATURE = 0.01

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
TokenCount = Annotated[int, Field(ge=0, lt=2**31)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
StopString = Annotated[str, Field(min_length=1, max_length=_MAX_STOP_CHARACTERS)]
StopStrings = Annotated[list[StopString], Field(fail_fast=True, max_length=_MAX_STOPS)]


class Body(BaseModel):
    """Base of request bodies, as strict as OpenAI: no string for a number, no bool for an integer. Undeclared fields
    are kept in `model_extra`."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)


def _field(description: str, **limits: Any) -> Any:
    return Field(default=None, description=description, **limits)


class SamplingFields(Body):
    """Sampling parameters as clients send them; null stands for the default."""

    temperature: float | None = _field("0 is greedy. Default 1", ge=0, le=2)
    top_p: float | None = _field("nucleus sampling; 0 is greedy", ge=0, le=1)
    top_k: int | None = _field("sample from the likeliest K tokens; 0 and -1 are off", ge=-1, lt=2**31)
    min_p: float | None = _field("drop tokens below this share of the likeliest one's probability", ge=0, le=1)
    presence_penalty: Penalty | None = _field("subtracted once from the logit of each token in the answer")
    frequency_penalty: Penalty | None = _field("subtracted once per occurrence in the answer")
    repetition_penalty: float | None = _field(
        "divides positive logits of tokens in prompt and answer, multiplies negative ones; 1 is off", ge=0.01, le=100
    )
    logit_bias: dict[int, Bias] | None = _field("added to the logits of these token ids", max_length=_MAX_NAMED_TOKENS)
    seed: Seed | None = _field("makes the answer repeatable; default: drawn at random, and reported in the answer")
    min_tokens: TokenCount | None = _field("the answer neither ends nor stops before this many tokens")
    stop: StopString | StopStrings | None = _field("strings that end the answer")
    stop_token_ids: TokenIds | None = _field("tokens that end the answer", max_length=_MAX_NAMED_TOKENS)
    include_stop_str_in_output: bool | None = _field("keep the stop string or token at the end of the answer")
    ignore_eos: bool | None = _field("continue after the model's end token")
    skip_special_tokens: bool | None = _field("leave special tokens out of the text. Default true")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of the engine. Fields that also exist in SamplingFields get their values from there."""

    seed: int  # 64 bits
    max_tokens: int
    num_logprobs: int | None = None  # alternatives reported per token, 0 to 20; None: no log-probabilities
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens seen so far."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


def sampling_params(
    body: SamplingFields, *, seed: int, max_tokens: int, num_logprobs: int | None, keep_special_tokens: bool
) -> SamplingParams:
    """Resolve request fields into engine parameters. `keep_special_tokens`: keep them in the text, because the parser
    of the answer needs them."""
    names = (field.name for field in fields(SamplingParams) if field.name in SamplingFields.model_fields)
    given = {name: value for name in names if (value := getattr(body, name)) is not None}
    given |= {name: resolve(given[name]) for name, resolve in _RESOLVED.items() if name in given}
    given |= {"seed": seed, "max_tokens": max_tokens, "num_logprobs": num_logprobs}
    if body.top_p == 0:
        given |= {"temperature": 0.0, "top_p": 1.0}
    if keep_special_tokens:
        given["skip_special_tokens"] = False
    given["min_tokens"] = min(given.get("min_tokens", 0), max_tokens)
    return SamplingParams(**given)


_RESOLVED: Mapping[str, Any] = {
    "temperature": lambda value: max(value, _LOWEST_TEMPERATURE) if value > 0 else 0.0,
    "top_k": lambda value: max(value, 0),
    "logit_bias": lambda value: tuple(sorted(value.items())),
    "stop": lambda value: (value,) if isinstance(value, str) else tuple(value),
    "stop_token_ids": frozenset,
}
"""Conversions from request values to engine values, by field."""
