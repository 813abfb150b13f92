"""Stage 2: what the target's layers say while it reads its own answers, and what else it might have said.

Tapped layer outputs in bf16 and the 64 likeliest tokens of every response position, in shards on disk that are kept
when they hold these very texts. The manifest says for which target they are and from which files.
Legend: batch, heads, length, dim.
"""

import hashlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from drafters.training.corpus import TOP, Shard, by_length
from drafters.training.parallel import Ranks, join, local_device
from service.assembly import device_of, load_target, refuse_widened
from service.config import ServiceConfig
from service.engine.drafter_start import tap_layers_for
from service.engine.modules import FeatureTaps, decoder_layers, refuse_unknown
from service.errors import StartupError
from service.logging import bar
from service.prompts import source_of
from service.training.regenerate import Response, read_responses

ATTENTION_NAME = "adaptree_dense"

MANIFEST_FILE = "features.json"

SHARD_SEQUENCES = 64
_LABEL_BYTES = TOP * 6
_SPARE = 1.02
_CPU_BATCH_TOKENS = 2048
_CUDA_BATCH_TOKENS = 16384


def dense_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attended: list[int],
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **unused: object,
) -> tuple[Tensor, None]:
    """query [batch, heads, length, dim], key and value [batch, kv_heads, length, dim] -> [batch, length, heads, dim].

    `attended` collects the layers that came by. Raises StartupError for anything that would change the result unseen.
    """
    refuse_unknown(module, {**unused, "attention_mask": attention_mask}, "so its features cannot be read here")
    attended.append(module.layer_idx)  # type: ignore[arg-type]
    dtype = query.dtype
    if query.device.type == "cpu":
        query, key, value = query.float(), key.float(), value.float()
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    length = query.shape[2]
    if softcap is None and (sliding_window is None or sliding_window >= length):
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    else:
        out = _masked(query * scale, key, value, sliding_window, softcap)
    return out.transpose(1, 2).to(dtype).contiguous(), None


def _masked(query: Tensor, key: Tensor, value: Tensor, window: int | None, softcap: float | None) -> Tensor:
    """softmax(cap(q k)) v over positions behind, and with a window only so many, the own one included."""
    positions = torch.arange(query.shape[2], device=query.device)
    behind = positions[:, None] - positions
    seen = (behind >= 0) & (behind < (window if window is not None else query.shape[2]))
    grouped = query.unflatten(1, (key.shape[1], -1))  # [batch, kv_heads, group, length, dim]
    scores = grouped @ key[:, :, None].transpose(3, 4)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1, dtype=torch.float32).to(value.dtype)
    out: Tensor = weights @ value[:, :, None]
    return out.flatten(1, 2)


AttentionInterface.register(ATTENTION_NAME, dense_attention)


@dataclass(frozen=True, slots=True)
class Manifest:
    """Written when the last shard is."""

    target: str  # the name it was asked for by
    target_identity: str
    tap_layers: tuple[int, ...]
    files: dict[str, str]  # name -> SHA-256
    responses_by_source: dict[str, int]
    responses_by_task: dict[str, int]
    responses_by_temperature: dict[str, int]
    response_tokens: int
    tokens: int
    shards: int

    def write(self, folder: Path) -> None:
        (folder / MANIFEST_FILE).write_text(json.dumps(asdict(self), indent=2, sort_keys=True) + "\n")

    @staticmethod
    def read(folder: Path) -> "Manifest":
        """Raises StartupError."""
        file = folder / MANIFEST_FILE
        try:
            values = json.loads(file.read_text())
            return Manifest(**{**values, "tap_layers": tuple(values["tap_layers"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise StartupError(
                f"{file} cannot be read ({error}); make the features with `adaptree train features`"
            ) from error

    def shard_paths(self, folder: Path) -> list[Path]:
        """Raises StartupError when one is missing."""
        paths = sorted(folder.glob("shard*.safetensors"))[: self.shards]
        if len(paths) < self.shards:
            raise StartupError(
                f"{folder} holds {len(paths)} shards of {self.shards}; run `adaptree train features` again"
            )
        return paths


def sha256_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _counted(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))


class FeatureReader:
    """Runs a target over whole texts."""

    def __init__(self, model: PreTrainedModel, tap_layers: Sequence[int], *, batch_tokens: int) -> None:
        model.set_attn_implementation(ATTENTION_NAME)
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
        for response in responses:
            largest = max(*response.prompt, *response.response)
            if largest >= self.vocab_size:
                raise StartupError(
                    f"response {response.id}: token {largest}, but this target has {self.vocab_size}; "
                    "it was written by another target: answer the prompts with this one"
                )
        found: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        for places in by_length([len(text) for text in texts], self._batch_tokens):
            prompts = [len(responses[place].prompt) for place in places]
            found.update(zip(places, self._run([texts[place] for place in places], prompts), strict=True))
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

    def _run(self, texts: Sequence[list[int]], prompts: Sequence[int]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Of each text: features [length, taps * hidden], top log-probabilities and ids [labels, TOP]."""
        length = max(map(len, texts))
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
        if attended != list(range(self._num_layers)):
            raise StartupError(
                "this model has layers whose attention is not one plain attention each; its features cannot be read"
            )
        for line, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
            logits = output.logits[line, prompt - 1 - first : len(text) - first].float()
            top = logits.topk(TOP)
            logprobs = top.values - logits.logsumexp(-1, keepdim=True)
            features = self._taps.take(len(text), line).to(torch.bfloat16).cpu()
            yield features, logprobs.to(torch.float16).cpu(), top.indices.to(torch.int32).cpu()


def write_shards(reader: FeatureReader, responses: Sequence[Response], folder: Path) -> Iterator[Sequence[Response]]:
    """One shard after the other, those that were there included; yields what each holds. Raises StartupError."""
    make_folder(folder)
    chunks = [responses[start : start + SHARD_SEQUENCES] for start in range(0, len(responses), SHARD_SEQUENCES)]
    paths = [folder / f"shard{number:05d}.safetensors" for number in range(len(chunks))]
    missing = [chunk for path, chunk in zip(paths, chunks, strict=True) if not _holds(path, chunk)]
    needed = sum(
        response.num_tokens * (reader.bytes_per_token + 4) + (len(response.response) + 1) * _LABEL_BYTES
        for chunk in missing
        for response in chunk
    )
    free = shutil.disk_usage(folder).free
    if needed * _SPARE > free:
        raise StartupError(
            f"the features need {needed / 1e9:.1f} GB, but {folder} has {free / 1e9:.1f} GB free: "
            "give another folder or fewer responses"
        )
    for path, chunk in zip(paths, chunks, strict=True):
        if not _holds(path, chunk):
            shard = reader.read(chunk)
            try:
                shard.save(path)
            except (OSError, SafetensorError) as error:
                raise StartupError(
                    f"{path} cannot be written ({error}); free some space and start again: it goes on"
                ) from None
        yield chunk


def _holds(path: Path, responses: Sequence[Response]) -> bool:
    """Whether the shard is there with all these texts, not the first of them only. Raises StartupError for others."""
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


def make_folder(folder: Path) -> None:
    """Raises StartupError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(f"the folder {folder} cannot be made: {error}") from error


def make_features(config: ServiceConfig, responses: Sequence[Path], out: Path, *, deadline: float | None) -> None:
    """Stage 2 as a command runs it. After the deadline (time.monotonic()) no further shard is begun."""
    wanted = read_responses(responses)
    device = device_of(config.device)
    refuse_widened(config)
    loaded = load_target(config, device)
    taps = tap_layers_for(loaded.model)
    most = _CUDA_BATCH_TOKENS if device.type == "cuda" else _CPU_BATCH_TOKENS
    reader = FeatureReader(loaded.model, taps, batch_tokens=most)
    began = time.monotonic()
    shards, tokens, kept = 0, 0, list[Response]()
    with bar("reading features", sum(response.num_tokens for response in wanted)) as advance:
        for chunk in write_shards(reader, wanted, out):
            shards, kept = shards + 1, [*kept, *chunk]
            tokens += sum(response.num_tokens for response in chunk)
            advance(tokens, f"shard {shards}, {tokens / (time.monotonic() - began):.0f} tokens/s")
            if deadline is not None and time.monotonic() > deadline:
                break
    manifest = Manifest(
        target=config.public_model_name,
        target_identity=loaded.parts.identity,
        tap_layers=tuple(taps),
        files={file.name: sha256_of(file) for file in responses},
        responses_by_source=_counted(source_of(response.id) for response in kept),
        responses_by_task=_counted(response.task or "unknown" for response in kept),
        responses_by_temperature=_counted(f"{response.temperature:g}" for response in kept),
        response_tokens=sum(len(response.response) for response in kept),
        tokens=tokens,
        shards=shards,
    )
    manifest.write(out)


def processes(config: ServiceConfig) -> Ranks:
    """Those of this run, on the device each has."""
    torch.set_num_threads(config.num_threads)
    device = local_device(device_of(config.device))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return join(device)
