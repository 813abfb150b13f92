"""What every form of an answer shares: its head, numbers of choices, totals over outputs, and what single steps did."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from pydantic import JsonValue

from service.api.request_builder import Job
from service.api.schemas import SamplingFields
from service.engine.requests import FinishReason, SequenceOutput, SpeculationRecord, StepTree, Timings, TokenLogprob
from service.runtime import ModelCard
from service.tokenizer import ChatTokenizer, IncrementalDetokenizer

Body = dict[str, JsonValue]

_DIGITS = 4  # of a survival


class Reply:
    """One answer in the making. Feed it each output with `count`, then ask for usage and metrics."""

    def __init__(
        self, job: Job, body: SamplingFields, card: ModelCard, tokenizer: ChatTokenizer, *, chunk_object: str
    ) -> None:
        options = body.stream_options
        self.tokenizer = tokenizer
        self._chunk_object = chunk_object
        self._trace = Trace(tokenizer, skip_special_tokens=job.requests[0].sampling.skip_special_tokens)
        self._job = job
        self._card = card
        self._first_choice = {
            request.request_id: position * job.choices_per_prompt for position, request in enumerate(job.requests)
        }
        self._completion_tokens = 0
        self._cached_tokens: dict[str, int] = {}
        self._speculation: list[SpeculationRecord] = []
        self._timings: list[Timings] = []
        self._detailed = body.speculation is not None and body.speculation.detailed is True
        self._include_usage = options is not None and options.include_usage is True
        self._continuous_usage = options is not None and options.continuous_usage_stats is True
        self.return_token_ids = body.return_token_ids is True

    def prompt_of(self, choice: int) -> list[JsonValue]:
        """Token ids of the prompt that a choice continues."""
        return list(self._job.requests[choice // self._job.choices_per_prompt].prompt)

    def count(self, output: SequenceOutput) -> int:
        """Add an output to the totals; returns the number of the choice it belongs to."""
        self._completion_tokens += len(output.token_ids)
        self._cached_tokens[output.request_id] = max(
            output.cached_tokens, self._cached_tokens.get(output.request_id, 0)
        )
        if output.speculation is not None:
            self._speculation.append(output.speculation)
        if output.timings is not None:
            self._timings.append(output.timings)
        return self._first_choice[output.request_id] + output.index

    def gather(self, outputs: Iterable[SequenceOutput]) -> list["Choice"]:
        choices = [Choice() for _ in range(len(self._job.requests) * self._job.choices_per_prompt)]
        for output in outputs:
            choices[self.count(output)].append(output)
        return choices

    def tells_tokens(self, output: SequenceOutput) -> bool:
        """Whether a chunk without text has something to tell."""
        return bool(output.token_ids) and bool(self.return_token_ids or output.logprobs or output.tree is not None)

    def tokens(self, token_ids: Sequence[int]) -> Body:
        """The tokens of a piece, for those who want them."""
        return {"token_ids": list(token_ids)} if self.return_token_ids else {}

    def trace(self, number: int, output: SequenceOutput) -> Body:
        """What a step did, for streams that ask with `speculation: {"trace": true}`; an extension of ours."""
        return {} if output.tree is None else {"speculation": self._trace.of(number, output, output.tree)}

    def _head(self, object_name: str) -> Body:
        return {
            "id": self._job.id,
            "object": object_name,
            "created": self._job.created,
            "model": self._job.model,
            "system_fingerprint": self._card.system_fingerprint,
            "seed": self._job.seed,
        }

    def body(self, object_name: str, choices: list[JsonValue]) -> Body:
        """An answer that is sent whole, or the end of a stream."""
        head = self._head(object_name)
        return {**head, "choices": choices, "usage": self._usage(), "metrics": self._metrics()}

    def chunk(self, choice: Body) -> Body:
        """One streamed piece; it names `usage` only when the client asked for usage."""
        chunk: Body = {**self._head(self._chunk_object), "choices": [choice]}
        if self._include_usage:
            chunk["usage"] = self._usage() if self._continuous_usage else None
        return chunk

    def trailer(self) -> Iterator[Body]:
        if self._include_usage:
            yield self.body(self._chunk_object, [])

    def _usage(self) -> Body:
        prompt_tokens = self._job.num_prompt_tokens
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached_tokens.values())},
            "completion_tokens_details": {
                "accepted_prediction_tokens": sum(record.accepted_prediction_tokens for record in self._speculation),
                "rejected_prediction_tokens": sum(record.rejected_prediction_tokens for record in self._speculation),
            },
        }

    def _metrics(self) -> Body:
        return {"speculative_decoding": self._speculative_decoding(), "timings": self._merged_timings()}

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
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def append(self, output: SequenceOutput) -> None:
        self.text += output.text
        self.token_ids += output.token_ids
        if output.logprobs is not None:
            self.logprobs = [*(self.logprobs or []), *output.logprobs]
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason


class Trace:
    """Words the steps of each choice in turn: the text of each token, how many were drafted, and their draft tree."""

    def __init__(self, tokenizer: ChatTokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._detokenizers: dict[int, IncrementalDetokenizer] = {}

    def of(self, choice: int, output: SequenceOutput, tree: StepTree) -> Body:
        """One step. A token that stopped the answer may be the last of an accepted path."""
        return {
            "accepted": min(len(tree.path), len(output.token_ids)),
            "drafted": len(tree.tokens),
            "texts": list[JsonValue](self._texts(choice, output)),
            "tree": {
                "texts": [self._tokenizer.decode([token]) for token in tree.tokens],
                "parents": list[JsonValue](tree.parents),
                "survival": [round(survival, _DIGITS) for survival in tree.survival],
                "path": list[JsonValue](tree.path),
            },
        }

    def _texts(self, choice: int, output: SequenceOutput) -> list[str]:
        """A character that several tokens share belongs to the last of them."""
        if choice not in self._detokenizers:
            self._detokenizers[choice] = self._tokenizer.detokenizer(self._skip_special_tokens)
        detokenizer = self._detokenizers[choice]
        texts = [detokenizer.push(token) for token in output.token_ids]
        if output.finish_reason is not None and texts:
            texts[-1] += detokenizer.flush()
        return texts
