"""Totals over the outputs of an answer (tokens, timings, acceptance), and the base of both completion routes' response
formats."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import ClassVar

from pydantic import JsonValue

from service.api.errors import error_body
from service.api.request_builder import Job
from service.api.schemas import StreamOptions
from service.engine.requests import SequenceOutput, SpeculationRecord, Timings
from service.errors import RequestError
from service.runtime import ModelCard
from service.text.answers import ThoughtTokens
from service.text.tokenizer import ChatTokenizer, IncrementalDetokenizer

Json = dict[str, JsonValue]

_DIGITS = 4  # decimals of a survival probability


class Totals:
    """Usage, acceptance and timings of an answer, accumulated over all choices."""

    def __init__(self, job: Job, card: ModelCard, tokenizer: ChatTokenizer) -> None:
        self._job = job
        self._card = card
        self._tokenizer = tokenizer
        self._completion_tokens = 0
        self._cached_tokens: dict[str, int] = {}  # cached prompt tokens by request id
        self._speculation: list[SpeculationRecord] = []
        self._timings: list[Timings] = []
        self._thoughts: dict[int, ThoughtTokens] = {}  # counters of reasoning tokens, by choice

    def add(self, output: SequenceOutput) -> int:
        """Add one engine output; returns the index of its choice."""
        name, cached = output.request_id, output.cached_tokens
        self._completion_tokens += len(output.token_ids)
        self._cached_tokens[name] = max(cached, self._cached_tokens.get(name, 0))
        if output.speculation is not None:
            self._speculation.append(output.speculation)
        if output.timings is not None:
            self._timings.append(output.timings)
        number = self._job.choice_of(output)
        if self._job.form.thinking is not None:
            if number not in self._thoughts:
                skips, prompt = self._job.sampling.skip_special_tokens, self._job.prompt_of(number)
                detokenizer = self._tokenizer.detokenizer(skips, prompt)
                self._thoughts[number] = ThoughtTokens(self._job.form.thinking, detokenizer.push)
            self._thoughts[number].read(output.token_ids)
        return number

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache."""
        return sum(self._cached_tokens.values())

    @property
    def reasoning_tokens(self) -> int:
        """Number of reasoning tokens."""
        return sum(thought.count for thought in self._thoughts.values())

    def usage(self) -> Json:
        """Build OpenAI's `usage` object."""
        prompt_tokens = sum(len(request.prompt) for request in self._job.requests)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {
                "reasoning_tokens": self.reasoning_tokens,
                "accepted_prediction_tokens": sum(record.accepted_prediction_tokens for record in self._speculation),
                "rejected_prediction_tokens": sum(record.rejected_prediction_tokens for record in self._speculation),
            },
        }

    def metrics(self) -> Json:
        """Build the `metrics` object: acceptance and timings."""
        return {"speculative_decoding": self._speculative_decoding(), "timings": self._merged_timings()}

    def _speculative_decoding(self) -> Json | None:
        """Build the acceptance statistics in vLLM's format, with the drafter. Returns None before any sequence has
        reported."""
        if not self._speculation:
            return None
        accepted = list(chain.from_iterable(record.accepted_per_step for record in self._speculation))
        drafted = list(chain.from_iterable(record.drafted_per_step for record in self._speculation))
        report: Json = {
            "mean_acceptance_length": 1.0 + sum(accepted) / len(accepted) if accepted else 1.0,
            "draft_acceptance_rate": sum(accepted) / sum(drafted) if any(drafted) else 0.0,
            "acceptance_histogram": [accepted.count(length) for length in range(self._card.num_spec_tokens + 1)],
            "num_spec_steps": len(accepted),
            "num_accepted_draft_tokens": sum(accepted),
            "num_draft_tokens": sum(drafted),
            "num_spec_tokens": self._card.num_spec_tokens,
            "drafter": self._speculation[-1].drafter,
            "drafter_version": self._speculation[-1].drafter_version,
        }
        wanted = self._job.body.speculation
        if wanted is not None and wanted.detailed:
            report["per_step_accepted"] = list[JsonValue](accepted)
            report["per_step_drafted"] = list[JsonValue](drafted)
        return report

    def _merged_timings(self) -> Json | None:
        if not self._timings:
            return None
        return {
            "queue_seconds": min(timings.queue_seconds for timings in self._timings),
            "first_token_seconds": min(timings.first_token_seconds for timings in self._timings),
            "total_seconds": max(timings.total_seconds for timings in self._timings),
        }


class Reply(ABC):
    """Response format of a completion route, whole or in chunks. Subclasses define the format of a choice."""

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, job: Job, card: ModelCard, tokenizer: ChatTokenizer) -> None:
        self._job = job
        self._card = card
        self._tokenizer = tokenizer
        self._totals = Totals(job, card, tokenizer)
        self._options = job.body.stream_options or StreamOptions()
        self._begun: set[int] = set()  # choices with sent chunks
        self._traced: dict[int, IncrementalDetokenizer] = {}  # detokenizers of traces, by choice

    @abstractmethod
    def chunks(self, output: SequenceOutput) -> Iterator[Json]:
        """Convert one engine output to chunks."""

    @abstractmethod
    def _choice(self, number: int, output: SequenceOutput) -> Json:
        """Format one choice of an unstreamed answer; `output` contains all of it."""

    def whole(self, outputs: Iterable[SequenceOutput]) -> Json:
        """Build the body of an unstreamed answer."""
        by_choice: list[list[SequenceOutput]] = [[] for _ in range(self._job.num_choices)]
        for output in map(self._shown, outputs):
            by_choice[self._totals.add(output)].append(output)
        return self._body(
            self.whole_object, [self._choice(number, merged(each)) for number, each in enumerate(by_choice)]
        )

    def trailer(self) -> Iterator[Json]:
        """Yield the last chunk, with the totals, if the client requested usage."""
        if self._options.include_usage:
            yield self._body(self.chunk_object, [])

    def failure(self, error: RequestError) -> Json:
        """Build the chunk that ends a failed stream."""
        return {name: {**fields} for name, fields in error_body(error).items()}

    def numbered(self, chunk: Mapping[str, JsonValue], number: int) -> Mapping[str, JsonValue]:
        """Return the chunk unchanged: completions do not number their events."""
        return chunk

    def _detokenizer(self, number: int) -> IncrementalDetokenizer:
        return self._tokenizer.detokenizer(self._job.sampling.skip_special_tokens, self._job.prompt_of(number))

    def _shown(self, output: SequenceOutput) -> SequenceOutput:
        """Remove the token that prefill produced if the request has `max_tokens` 0."""
        if self._job.body.max_tokens != 0:
            return output
        logprobs = None if output.logprobs is None else ()
        return replace(output, token_ids=(), text="", logprobs=logprobs, finish_reason="length", stop_reason=None)

    def _reports_tokens(self, output: SequenceOutput) -> bool:
        """Whether an output without text needs a chunk."""
        details = self._job.return_token_ids or output.logprobs or output.tree is not None
        return bool(output.prompt_logprobs) or (bool(output.token_ids) and bool(details))

    def _tokens(self, token_ids: Sequence[int]) -> Json:
        """Return the field with the token ids of a piece, if the client requested them."""
        return {"token_ids": list(token_ids)} if self._job.return_token_ids else {}

    def _trace(self, number: int, output: SequenceOutput) -> Json:
        """Build the draft tree of a step, for streams with `speculation: {"trace": true}`, an extension of OpenAI's
        API. The accepted path may end with a token that stopped the answer and is not sent."""
        tree = output.tree
        if tree is None:
            return {}
        step: Json = {
            "accepted": min(len(tree.path), len(output.token_ids)),
            "drafted": len(tree.tokens),
            "texts": list[JsonValue](self._texts(number, output)),
            "tree": {
                "texts": [self._tokenizer.token_text(token) for token in tree.tokens],
                "parents": list[JsonValue](tree.parents),
                "survival": [round(survival, _DIGITS) for survival in tree.survival],
                "path": list[JsonValue](tree.path),
            },
        }
        return {"speculation": step}

    def _texts(self, number: int, output: SequenceOutput) -> list[str]:
        """Return the text of each token. A character that several tokens share is part of the last one's text."""
        if number not in self._traced:
            self._traced[number] = self._detokenizer(number)
        texts = [self._traced[number].push(token) for token in output.token_ids]
        if output.finish_reason is not None and texts:
            texts[-1] += self._traced[number].held
        return texts

    def _head(self, object_name: str) -> Json:
        return {
            "id": self._job.id,
            "object": object_name,
            "created": self._job.origin.created,
            "model": self._job.body.model,
            "system_fingerprint": self._card.system_fingerprint,
            "seed": self._job.sampling.seed,
        }

    def _body(self, object_name: str, choices: list[JsonValue]) -> Json:
        """Build the body of an unstreamed answer or of the last chunk of a stream."""
        totals: Json = {"usage": self._totals.usage(), "metrics": self._totals.metrics()}
        return {**self._head(object_name), "choices": choices, **totals}

    def _chunk(self, choice: Json) -> Json:
        """Build one chunk of a stream, with `usage` only if the client requested it."""
        chunk: Json = {**self._head(self.chunk_object), "choices": [choice]}
        if self._options.include_usage:
            chunk["usage"] = self._totals.usage() if self._options.continuous_usage_stats else None
        return chunk


def merged(outputs: Sequence[SequenceOutput]) -> SequenceOutput:
    """Concatenate consecutive outputs of a sequence."""
    if len(outputs) == 1:
        return outputs[0]
    has_logprobs = outputs[-1].logprobs is not None
    return replace(
        outputs[-1],
        token_ids=tuple(chain.from_iterable(output.token_ids for output in outputs)),
        text="".join(output.text for output in outputs),
        logprobs=tuple(chain.from_iterable(output.logprobs or () for output in outputs)) if has_logprobs else None,
        prompt_logprobs=outputs[0].prompt_logprobs,
    )
