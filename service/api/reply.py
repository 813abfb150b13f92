"""What every form of an answer shares: its head, numbers of choices, totals over outputs, and what single steps did."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import ClassVar

from pydantic import JsonValue

from service.api.errors import error_body
from service.api.request_builder import Job
from service.engine.requests import FinishReason, SequenceOutput, SpeculationRecord, Timings, TokenLogprob
from service.errors import RequestError
from service.runtime import ModelCard
from service.thinking import ThoughtTokens
from service.tokenizer import ChatTokenizer, IncrementalDetokenizer

Body = dict[str, JsonValue]

_DIGITS = 4  # of a survival


class Reply(ABC):
    """One answer in the making, whole or in chunks; routes differ in how a choice is worded."""

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, job: Job, card: ModelCard, tokenizer: ChatTokenizer) -> None:
        body, sampling, options = job.body, job.requests[0].sampling, job.body.stream_options
        self._job = job
        self._card = card
        self._tokenizer = tokenizer
        self._num_top = sampling.num_logprobs or 0
        self._skip_special_tokens = sampling.skip_special_tokens
        self._n = job.requests[0].n
        self._first_choice = job.first_choice
        self._begun: set[int] = set()  # choices of which something was sent
        self._text_length: Counter[int] = Counter()  # of tokens that were sent with log-probabilities, by choice
        self._offsets: dict[int, IncrementalDetokenizer] = {}  # which measure that, by choice
        self._completion_tokens = 0
        self._cached_tokens: dict[str, int] = {}
        self._speculation: list[SpeculationRecord] = []
        self._timings: list[Timings] = []
        self._detokenizers: dict[int, IncrementalDetokenizer] = {}  # of traces, by choice
        self._thoughts: dict[int, ThoughtTokens] = {}  # of models that think, by choice
        self._detailed = body.speculation is not None and body.speculation.detailed is True
        self._include_usage = options is not None and options.include_usage is True
        self._continuous_usage = options is not None and options.continuous_usage_stats is True
        self._return_token_ids = body.return_token_ids is True

    @abstractmethod
    def chunks(self, output: SequenceOutput) -> Iterator[Body]:
        """What is streamed of one output."""

    @abstractmethod
    def _choice(self, number: int, choice: "Choice") -> Body:
        """One choice of an answer that is sent whole."""

    def whole(self, outputs: Iterable[SequenceOutput]) -> Body:
        """An answer that is not streamed."""
        choices = [Choice() for _ in range(len(self._job.requests) * self._n)]
        for output in map(self._shown, outputs):
            choices[self._count(output)].append(output)
        return self._body(self.whole_object, [self._choice(number, choice) for number, choice in enumerate(choices)])

    def trailer(self) -> Iterator[Body]:
        if self._include_usage:
            yield self._body(self.chunk_object, [])

    def failure(self, error: RequestError) -> Body:
        """What ends a stream that broke off."""
        return {name: {**told} for name, told in error_body(error).items()}

    def numbered(self, chunk: Mapping[str, JsonValue], number: int) -> Mapping[str, JsonValue]:
        """Completions count no events."""
        return chunk

    def _prompt_of(self, choice: int) -> list[JsonValue]:
        """Token ids of the prompt that a choice continues."""
        return list(self._job.requests[choice // self._n].prompt)

    def _count(self, output: SequenceOutput) -> int:
        """Add an output to the totals; returns the number of the choice it belongs to."""
        self._completion_tokens += len(output.token_ids)
        self._cached_tokens[output.request_id] = max(
            output.cached_tokens, self._cached_tokens.get(output.request_id, 0)
        )
        if output.speculation is not None:
            self._speculation.append(output.speculation)
        if output.timings is not None:
            self._timings.append(output.timings)
        number = self._first_choice[output.request_id] + output.index
        if self._job.thinking is not None:
            if number not in self._thoughts:
                detokenizer = self._tokenizer.detokenizer(self._skip_special_tokens)
                self._thoughts[number] = ThoughtTokens(self._job.thinking, detokenizer.push)
            self._thoughts[number].read(output.token_ids)
        return number

    def _shown(self, output: SequenceOutput) -> SequenceOutput:
        """What is sent of an output; of an answer of 0 tokens not the one that reading its prompt brings."""
        if self._job.body.max_tokens != 0:
            return output
        logprobs = None if output.logprobs is None else ()
        return replace(output, token_ids=(), text="", logprobs=logprobs, finish_reason="length", stop_reason=None)

    def _tells_tokens(self, output: SequenceOutput) -> bool:
        """Whether a chunk without text has something to tell."""
        told = self._return_token_ids or output.logprobs or output.tree is not None
        return bool(output.prompt_logprobs) or (bool(output.token_ids) and bool(told))

    def _tokens(self, token_ids: Sequence[int]) -> Body:
        """The tokens of a piece, for those who want them."""
        return {"token_ids": list(token_ids)} if self._return_token_ids else {}

    def _trace(self, number: int, output: SequenceOutput) -> Body:
        """What a step did, for streams that ask with `speculation: {"trace": true}`; an extension of ours.

        A token that stopped the answer may be the last of an accepted path.
        """
        tree = output.tree
        if tree is None:
            return {}
        step: Body = {
            "accepted": min(len(tree.path), len(output.token_ids)),
            "drafted": len(tree.tokens),
            "texts": list[JsonValue](self._texts(number, output)),
            "tree": {
                "texts": [self._tokenizer.decode([token]) for token in tree.tokens],
                "parents": list[JsonValue](tree.parents),
                "survival": [round(survival, _DIGITS) for survival in tree.survival],
                "path": list[JsonValue](tree.path),
            },
        }
        return {"speculation": step}

    def _texts(self, choice: int, output: SequenceOutput) -> list[str]:
        """Of each token. A character that several tokens share belongs to the last of them."""
        if choice not in self._detokenizers:
            self._detokenizers[choice] = self._tokenizer.detokenizer(self._skip_special_tokens)
        detokenizer = self._detokenizers[choice]
        texts = [detokenizer.push(token) for token in output.token_ids]
        if output.finish_reason is not None and texts:
            texts[-1] += detokenizer.flush()
        return texts

    def _head(self, object_name: str) -> Body:
        return {
            "id": self._job.id,
            "object": object_name,
            "created": self._job.origin.created,
            "model": self._job.body.model,
            "system_fingerprint": self._card.system_fingerprint,
            "seed": self._job.requests[0].sampling.seed,
        }

    def _body(self, object_name: str, choices: list[JsonValue]) -> Body:
        """An answer that is sent whole, or the end of a stream."""
        metrics: Body = {"speculative_decoding": self._speculative_decoding(), "timings": self._merged_timings()}
        return {**self._head(object_name), "choices": choices, "usage": self._usage(), "metrics": metrics}

    def _chunk(self, choice: Body) -> Body:
        """One streamed piece; it names `usage` only when the client asked for usage."""
        chunk: Body = {**self._head(self.chunk_object), "choices": [choice]}
        if self._include_usage:
            chunk["usage"] = self._usage() if self._continuous_usage else None
        return chunk

    def _usage(self) -> Body:
        prompt_tokens = sum(len(request.prompt) for request in self._job.requests)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached_tokens.values())},
            "completion_tokens_details": {
                "reasoning_tokens": self._reasoning_tokens,
                "accepted_prediction_tokens": sum(record.accepted_prediction_tokens for record in self._speculation),
                "rejected_prediction_tokens": sum(record.rejected_prediction_tokens for record in self._speculation),
            },
        }

    @property
    def _reasoning_tokens(self) -> int:
        return sum(thought.count for thought in self._thoughts.values())

    def _speculative_decoding(self) -> Body | None:
        """vLLM's record of acceptance, over all choices, and which drafter it was."""
        if not self._speculation:
            return None
        accepted = list(chain.from_iterable(record.accepted_per_step for record in self._speculation))
        drafted = list(chain.from_iterable(record.drafted_per_step for record in self._speculation))
        report: Body = {
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
        if self._detailed:
            report["per_step_accepted"] = list[JsonValue](accepted)
            report["per_step_drafted"] = list[JsonValue](drafted)
        return report

    def _merged_timings(self) -> Body | None:
        if not self._timings:
            return None
        return {
            "queue_seconds": min(timings.queue_seconds for timings in self._timings),
            "first_token_seconds": min(timings.first_token_seconds for timings in self._timings),
            "total_seconds": max(timings.total_seconds for timings in self._timings),
        }


@dataclass(slots=True)
class Choice:
    """One choice of an answer that is sent whole."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    is_cut: bool = False

    def append(self, output: SequenceOutput) -> None:
        self.text += output.text
        self.token_ids += output.token_ids
        if output.logprobs is not None:
            self.logprobs = [*(self.logprobs or []), *output.logprobs]
        self.prompt_logprobs += output.prompt_logprobs
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason
        self.is_cut = output.is_cut
