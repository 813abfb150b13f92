"""Stage 2 of training: extracts the target's features and next-token distributions over its own answers.

Shards on disk hold tapped layer outputs in bf16, and the 64 likeliest tokens of every response position. An existing
shard of the same texts is kept. The manifest names the target and the response files.

Legend: batch, heads, length = tokens of the longest sequence, dim = head_dim.
"""

import hashlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, PreTrainedModel

from drafters.training.corpus import TOP, Shard, by_length
from drafters.training.fit import bf16_is_faster
from drafters.training.forward import attend
from drafters.training.parallel import Ranks, join, local_device
from kernels.cpu.library import use_threads
from service.assembly import device_of, load_target
from service.config import ServiceConfig
from service.engine.initial_drafter import tap_layers_for
from service.engine.modules import FeatureTaps, decoder_layers, refuse_unknown
from service.engine.weights import LoadedModel
from service.errors import StartupError
from service.learning.regenerate import Response, read_responses
from service.logging import bar
from service.text.prompts import source_of

MANIFEST_FILE = "features.json"

FEATURE_SHARE = 0.3
"""Largest share of the time of a whole training run that extracting features may take."""

SHARD_SEQUENCES = 64
_LABEL_BYTES = TOP * 6
_SPARE = 1.02
_CPU_BATCH_TOKENS = 2048
_CUDA_BATCH_TOKENS = 16384


@dataclass(frozen=True, slots=True)
class Manifest:
    """Description of a features folder: its target, and the texts it holds. Written after the last shard."""

    target: str  # name as given on the command line
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
        """Write the manifest to a features folder."""
        (folder / MANIFEST_FILE).write_text(json.dumps(asdict(self), indent=2, sort_keys=True) + "\n")

    @staticmethod
    def read(folder: Path) -> "Manifest":
        """Read the manifest of a features folder. Raises StartupError."""
        file = folder / MANIFEST_FILE
        try:
            values = json.loads(file.read_text())
            return Manifest(**{**values, "tap_layers": tuple(values["tap_layers"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise StartupError(
                f"{file} cannot be read ({error}); make the features with `adaptree train features`"
            ) from error

    def shard_paths(self, folder: Path) -> list[Path]:
        """List the paths of all shards. Raises StartupError if one is missing."""
        paths = sorted(folder.glob("shard*.safetensors"))[: self.shards]
        if len(paths) < self.shards:
            raise StartupError(
                f"{folder} holds {len(paths)} of {self.shards} shards; run `adaptree train features` again"
            )
        return paths


def sha256_of(file: Path) -> str:
    """Compute the SHA-256 of a file, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _counted(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))


ATTENTION_NAME = "adaptree_dense"


def dense_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attended: list[int],
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention over whole sequences; registered in transformers as an attention function.

    query [batch, heads, length, dim], key and value [batch, kv_heads, length, dim] -> [batch, length, heads, dim].
    `attended` collects the indices of the layers that have run; `options` are transformers' own: scaling,
    sliding_window, softcap, dropout (ignored). Raises StartupError for any other that would change the result.
    """
    known = {name: options.pop(name, None) for name in ("scaling", "sliding_window", "softcap", "dropout")}
    refuse_unknown(module, {**options, "attention_mask": attention_mask}, "so its features cannot be read here")
    attended.append(module.layer_idx)  # type: ignore[arg-type]
    scaling, window, softcap, _ = known.values()
    dtype = query.dtype
    if query.device.type == "cpu":
        query, key, value = query.float(), key.float(), value.float()
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    length = query.shape[2]
    if softcap is None and (window is None or window >= length):
        out = attend(query, key, value, scale=scale)
    else:
        out = _masked(query * scale, key, value, length if window is None else window, softcap)
    return out.transpose(1, 2).to(dtype).contiguous(), None


def _masked(query: Tensor, key: Tensor, value: Tensor, window: int, softcap: float | None) -> Tensor:
    """Compute softmax(cap(q k)) v over the last `window` positions.
    # query [batch, heads, length, dim], key, value [batch, kv_heads, length, dim] -> like query"""
    row = torch.arange(query.shape[2], device=query.device)
    distance = row[:, None] - row
    seen = (distance >= 0) & (distance < window)  # [length, length]
    grouped = query.unflatten(1, (key.shape[1], -1))  # [batch, kv_heads, group, length, dim]
    scores = grouped @ key[:, :, None].transpose(3, 4)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1, dtype=torch.float32).to(value.dtype)
    out: Tensor = weights @ value[:, :, None]
    return out.flatten(1, 2)


AttentionInterface.register(ATTENTION_NAME, dense_attention)


class FeatureReader:
    """Runs a target over whole sequences, and collects its features and next-token distributions."""

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
        """Extract the features and distributions of responses, in their order. Raises StartupError for tokens that the
        target does not have."""
        for response in responses:
            largest = max(*response.prompt, *response.response)
            if largest >= self.vocab_size:
                raise StartupError(
                    f"response {response.id}: token {largest}, but this target has {self.vocab_size} tokens; "
                    "it was written by another target: answer the prompts with this one"
                )
        texts = [_Text(response.prompt + response.response, len(response.prompt)) for response in responses]
        found: dict[int, _Read] = {}
        for indices in by_length([response.num_tokens for response in responses], self._batch_tokens):
            found.update(zip(indices, self._run([texts[index] for index in indices]), strict=True))
        reads = [found[index] for index in range(len(responses))]
        return Shard(
            tokens=torch.tensor([t for one in responses for t in (*one.prompt, *one.response)], dtype=torch.int32),
            features=torch.cat([read.features for read in reads]),
            lengths=torch.tensor([response.num_tokens for response in responses]),
            prompts=torch.tensor([len(response.prompt) for response in responses]),
            temps=torch.tensor([response.temperature for response in responses]),
            top_ids=torch.cat([read.top_ids for read in reads]),
            top_logprobs=torch.cat([read.top_logprobs for read in reads]),
        )

    def _run(self, texts: Sequence["_Text"]) -> Iterator["_Read"]:
        """Run texts as one batch, padded to the longest. Raises StartupError if the model's attention is not
        supported."""
        ids = pad_sequence([torch.tensor(text.tokens) for text in texts], batch_first=True)
        first = min(text.prompt for text in texts) - 1  # the position that predicts the first response token
        attended: list[int] = []
        output = self._model(
            input_ids=ids.to(self._device),
            use_cache=False,
            logits_to_keep=torch.arange(first, ids.shape[1], device=self._device),
            attended=attended,
        )
        if attended != list(range(self._num_layers)):
            raise StartupError(
                "this model has layers whose attention is not one plain attention each; its features cannot be read"
            )
        for row, (tokens, prompt) in enumerate(texts):
            features = self._taps.take(len(tokens), row).to(torch.bfloat16).cpu()
            yield _Read.of(features, output.logits[row, prompt - 1 - first : len(tokens) - first])


class _Text(NamedTuple):
    tokens: list[int]
    prompt: int


class _Read(NamedTuple):
    """Features of one text, and the target's likeliest tokens at its response positions."""

    features: Tensor  # [length, taps * hidden] bfloat16
    top_ids: Tensor  # [labels, TOP] int32
    top_logprobs: Tensor  # [labels, TOP] float16

    @staticmethod
    def of(features: Tensor, logits: Tensor) -> "_Read":
        logits = logits.float()
        top = logits.topk(TOP)
        logprobs = top.values - logits.logsumexp(-1, keepdim=True)
        return _Read(features, top.indices.to(torch.int32).cpu(), logprobs.to(torch.float16).cpu())


def write_shards(reader: FeatureReader, responses: Sequence[Response], folder: Path) -> Iterator[Sequence[Response]]:
    """Write the missing shards; yields the responses of each shard, including existing shards. Raises StartupError."""
    make_folder(folder)
    chunks = [responses[start : start + SHARD_SEQUENCES] for start in range(0, len(responses), SHARD_SEQUENCES)]
    paths = [folder / f"shard{number:05d}.safetensors" for number in range(len(chunks))]
    kept = [_holds(path, chunk) for path, chunk in zip(paths, chunks, strict=True)]
    missing = [chunk for is_kept, chunk in zip(kept, chunks, strict=True) if not is_kept]
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
    for path, chunk, is_kept in zip(paths, chunks, kept, strict=True):
        if not is_kept:
            shard = reader.read(chunk)
            try:
                shard.save(path)
            except (OSError, SafetensorError) as error:
                raise StartupError(
                    f"{path} cannot be written ({error}); free some space and start again: the run is resumed"
                ) from None
        yield chunk


def _holds(path: Path, responses: Sequence[Response]) -> bool:
    """Whether a shard holds all of these texts; False if it is missing or holds only the first ones. Raises
    StartupError if it holds other texts."""
    if not path.exists():
        return False
    try:
        with safe_open(path, framework="pt") as shard:
            tokens, lengths = shard.get_tensor("tokens"), shard.get_tensor("lengths")
    except (OSError, SafetensorError) as error:
        raise StartupError(f"{path} cannot be read ({error}); delete it, and the next run computes it again") from error
    wanted = [token for response in responses for token in (*response.prompt, *response.response)]
    if lengths.shape[0] > len(responses) or tokens.tolist() != wanted[: tokens.shape[0]]:
        raise StartupError(f"{path} holds other texts than these responses; give another folder or delete it")
    return int(lengths.shape[0]) == len(responses)


def make_folder(folder: Path) -> None:
    """Create a folder. Raises StartupError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(f"the folder {folder} cannot be made: {error}") from error


def make_features(
    config: ServiceConfig,
    responses: Sequence[Path],
    out: Path,
    *,
    deadline: float | None,
    loaded: LoadedModel | None = None,
    taps: Sequence[int] = (),
) -> None:
    """Run stage 2. After the deadline (time.monotonic()), no further shard is begun. `loaded`: the target, if it is
    loaded already; `taps`: layers to tap, by default those that a new drafter taps. Raises StartupError."""
    wanted = read_responses(responses)
    device = device_of(config.device)
    loaded = loaded or load_target(config, device)
    size = sum(weight.numel() for weight in loaded.model.parameters()) * torch.float32.itemsize
    if size < psutil.virtual_memory().available and not bf16_is_faster(device):
        loaded.model.float()  # the same weights
    taps = taps or tap_layers_for(loaded.model)
    most = _CUDA_BATCH_TOKENS if device.type == "cuda" else _CPU_BATCH_TOKENS
    reader = FeatureReader(loaded.model, taps, batch_tokens=most)
    before = time.monotonic()
    shards, tokens, kept = 0, 0, list[Response]()
    with bar("reading features", sum(response.num_tokens for response in wanted)) as advance:
        for chunk in write_shards(reader, wanted, out):
            shards, kept = shards + 1, [*kept, *chunk]
            read, now = sum(response.num_tokens for response in chunk), time.monotonic()
            tokens += read
            advance(tokens, f"shard {shards}, {read / (now - before):.0f} tokens/s")
            before = now
            if deadline is not None and now > deadline:
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
    """Set threads and device of this process, and join it with the other processes of the run (under torchrun)."""
    use_threads(config.num_threads)
    torch.set_num_threads(config.num_threads)  # training computes in torch
    device = local_device(device_of(config.device))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return join(device)
