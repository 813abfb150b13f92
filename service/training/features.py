"""Stage 2: what the target's layers say while it reads its own answers, and what else it might have said.

Tapped layer outputs in bf16 and the 64 likeliest tokens of every response position, in shards on disk. A shard that is
there already and holds these very texts is kept, so a run that was stopped goes on.
"""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from drafters.training.corpus import TOP, Shard
from service.engine.target import FeatureTaps, decoder_layers
from service.errors import StartupError
from service.training import dense_attention
from service.training.responses import Response

SHARD_SEQUENCES = 64
_LABEL_BYTES = TOP * 6
_SPARE = 1.02


@dataclass(frozen=True, slots=True)
class TextBatch:
    """Texts that are read together, by their places in the shard."""

    places: list[int]
    length: int


class FeatureReader:
    """Runs a target over whole texts."""

    def __init__(self, model: PreTrainedModel, tap_layers: Sequence[int], *, batch_tokens: int) -> None:
        model.set_attn_implementation(dense_attention.ATTENTION_NAME)
        self._model = model
        self._device = model.device
        self._batch_tokens = batch_tokens
        self._num_layers = len(decoder_layers(model))
        self._taps = FeatureTaps(decoder_layers(model), tap_layers)
        config = model.config.get_text_config()
        self.vocab_size = int(config.vocab_size)
        self.bytes_per_token = len(tap_layers) * int(config.hidden_size) * 2

    @torch.inference_mode()
    def read(self, responses: Sequence[Response]) -> Shard:
        """Everything about these texts, in their order. Raises StartupError for tokens the target does not have."""
        texts = [response.prompt + response.response for response in responses]
        self._refuse_foreign(responses)
        found: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        for batch in by_length([len(text) for text in texts], self._batch_tokens):
            prompts = [len(responses[place].prompt) for place in batch.places]
            outputs = self._run([texts[place] for place in batch.places], prompts, batch.length)
            found.update(zip(batch.places, outputs, strict=True))
        features, logprobs, ids = zip(*(found[place] for place in range(len(texts))), strict=True)
        return Shard(
            tokens=torch.tensor([token for text in texts for token in text], dtype=torch.int32),
            features=torch.cat(features),
            lengths=torch.tensor([len(text) for text in texts]),
            prompts=torch.tensor([len(response.prompt) for response in responses]),
            temps=torch.tensor([response.temperature for response in responses]),
            top_ids=torch.cat(ids),
            top_logprobs=torch.cat(logprobs),
        )

    def _run(
        self, texts: Sequence[list[int]], prompts: Sequence[int], length: int
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Of each text: features [length, taps * hidden], top log-probabilities and ids [labels, TOP]."""
        ids = torch.zeros(len(texts), length, dtype=torch.int64)
        for line, text in enumerate(texts):
            ids[line, : len(text)] = torch.tensor(text)
        first = min(prompts) - 1  # the position that predicts the first response token
        attended: list[int] = []
        output = self._model(
            input_ids=ids.to(self._device),
            use_cache=False,
            logits_to_keep=torch.arange(first, length, device=self._device),
            attended=attended,
        )
        self._refuse_bypass(attended)
        for line, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
            logits = output.logits[line, prompt - 1 - first : len(text) - first].float()
            top = logits.topk(TOP)
            logprobs = top.values - logits.logsumexp(-1, keepdim=True)
            features = self._taps.take(len(text), line).to(torch.bfloat16).cpu()
            yield features, logprobs.to(torch.float16).cpu(), top.indices.to(torch.int32).cpu()

    def _refuse_foreign(self, responses: Sequence[Response]) -> None:
        for response in responses:
            largest = max(*response.prompt, *response.response)
            if largest >= self.vocab_size:
                raise StartupError(
                    f"response {response.id}: token {largest}, but this target has {self.vocab_size}; "
                    "it was written by another target: answer the prompts with this one"
                )

    def _refuse_bypass(self, attended: list[int]) -> None:
        if attended != list(range(self._num_layers)):
            raise StartupError(
                "this model has layers whose attention is not one plain attention each; its features cannot be read"
            )


def by_length(lengths: Sequence[int], most_tokens: int) -> Iterator[TextBatch]:
    """Texts of similar length together, of at most so many tokens with padding; a longer text goes alone."""
    order = sorted(range(len(lengths)), key=lambda place: lengths[place])
    waiting: list[int] = []
    for place in order:
        if waiting and lengths[place] * (len(waiting) + 1) > most_tokens:
            yield TextBatch(waiting, lengths[waiting[-1]])
            waiting = []
        waiting.append(place)
    if waiting:
        yield TextBatch(waiting, lengths[waiting[-1]])


def write_shards(reader: FeatureReader, responses: Sequence[Response], folder: Path) -> Iterator[Sequence[Response]]:
    """One shard after the other, those that were there included; yields what each holds. Raises StartupError."""
    _make_folder(folder)
    chunks = [responses[start : start + SHARD_SEQUENCES] for start in range(0, len(responses), SHARD_SEQUENCES)]
    paths = [folder / f"shard{number:05d}.safetensors" for number in range(len(chunks))]
    missing = [chunk for path, chunk in zip(paths, chunks, strict=True) if not _holds(path, chunk)]
    _refuse_full(folder, sum(_bytes(response, reader.bytes_per_token) for chunk in missing for response in chunk))
    for path, chunk in zip(paths, chunks, strict=True):
        if not _holds(path, chunk):
            _save(reader.read(chunk), path)
        yield chunk


def _holds(path: Path, responses: Sequence[Response]) -> bool:
    """Whether the shard is there with these texts. One that holds only the first of them was the last of a shorter run;
    one that holds others is refused, for it is not ours to overwrite."""
    if not path.exists():
        return False
    try:
        with safe_open(path, framework="pt") as shard:
            tokens, lengths = shard.get_tensor("tokens"), shard.get_tensor("lengths")
    except (OSError, SafetensorError) as error:
        raise StartupError(f"{path} cannot be read ({error}); delete it") from error
    wanted = [token for response in responses for token in (*response.prompt, *response.response)]
    if lengths.shape[0] > len(responses) or tokens.tolist() != wanted[: tokens.shape[0]]:
        raise StartupError(f"{path} holds other texts than these responses; give another folder or delete it")
    return int(lengths.shape[0]) == len(responses)


def _save(shard: Shard, path: Path) -> None:
    try:
        shard.save(path)
    except (OSError, SafetensorError) as error:
        raise StartupError(f"{path} cannot be written ({error}); free some space and start again: it goes on") from None


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(f"the folder {folder} cannot be made: {error}") from error


def _refuse_full(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed * _SPARE > free:
        raise StartupError(
            f"the features need {needed / 1e9:.1f} GB, but {folder} has {free / 1e9:.1f} GB free: "
            "give another folder or fewer responses"
        )


def _bytes(response: Response, per_token: int) -> int:
    return response.num_tokens * (per_token + 4) + (len(response.response) + 1) * _LABEL_BYTES
