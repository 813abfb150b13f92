"""Stage 2: extracts the target's features and next-token distributions over its own answers.

Shards on disk hold tapped layer outputs in bf16 and the 64 likeliest tokens of every response position, with branches
also those after alternative tokens. A shard that holds the same texts is kept. The manifest names target and files.
"""

import hashlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from adaptation.timing import bf16_is_faster
from drafters.training.corpus import TOP, Shard, by_length, likeliest_others
from drafters.training.parallel import Ranks, join, local_device
from kernels.cpu.library import use_threads
from service.assembly import device_of, load_target
from service.config import ServiceConfig
from service.engine.drafter_weights import tap_layers_for
from service.engine.modules import FeatureTaps, decoder_layers
from service.engine.weights import LoadedModel
from service.errors import StartupError
from service.logging import bar
from service.text.prompts import source_of
from service.training.attention import ATTENTION_NAME, Rows
from service.training.regenerate import Response, read_responses

MANIFEST_FILE = "features.json"

SHARD_SEQUENCES = 64
_LABEL_BYTES = TOP * 6
_SPARE = 1.02
_CPU_BATCH_TOKENS = 2048
_CUDA_BATCH_TOKENS = 16384


@dataclass(frozen=True, slots=True)
class Manifest:
    """Description of a features folder, written after its last shard."""

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
        """Write the manifest's file."""
        (folder / MANIFEST_FILE).write_text(json.dumps(asdict(self), indent=2, sort_keys=True) + "\n")

    @staticmethod
    def read(folder: Path) -> "Manifest":
        """Read the manifest of a folder. Raises StartupError."""
        file = folder / MANIFEST_FILE
        try:
            values = json.loads(file.read_text())
            return Manifest(**{**values, "tap_layers": tuple(values["tap_layers"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise StartupError(
                f"{file} cannot be read ({error}); make the features with `adaptree train features`"
            ) from error

    def shard_paths(self, folder: Path) -> list[Path]:
        """Paths of all shards. Raises StartupError when one is missing."""
        paths = sorted(folder.glob("shard*.safetensors"))[: self.shards]
        if len(paths) < self.shards:
            raise StartupError(
                f"{folder} holds {len(paths)} shards of {self.shards}; run `adaptree train features` again"
            )
        return paths


def sha256_of(file: Path) -> str:
    """SHA-256 of a file, in hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _counted(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))


class FeatureReader:
    """Runs a target over whole sequences and collects its features and distributions."""

    def __init__(
        self, model: PreTrainedModel, tap_layers: Sequence[int], *, batch_tokens: int, branches: int = 0
    ) -> None:
        """`branches`: alternative tokens at each response position after which the target is evaluated too."""
        self.branches = branches
        model.set_attn_implementation(ATTENTION_NAME)
        self._model = model
        self._device = model.device
        self._batch_tokens = (
            batch_tokens // 4 if branches else batch_tokens
        )  # twice the rows; attention scores grow with their square
        self._num_layers = len(decoder_layers(model))
        self._taps = FeatureTaps(decoder_layers(model), tap_layers)
        config = model.config.get_text_config()
        self.vocab_size = int(config.vocab_size)
        self.bytes_per_token = len(tap_layers) * int(config.hidden_size) * 2

    @torch.inference_mode()
    def read(self, responses: Sequence[Response]) -> Shard:
        """Features and distributions of these responses, in their order. Raises StartupError for tokens the target does
        not have."""
        for response in responses:
            largest = max(*response.prompt, *response.response)
            if largest >= self.vocab_size:
                raise StartupError(
                    f"response {response.id}: token {largest}, but this target has {self.vocab_size}; "
                    "it was written by another target: answer the prompts with this one"
                )
        texts = [_Text(response.prompt + response.response, len(response.prompt)) for response in responses]
        found: dict[int, _Read] = {}
        for indices in by_length([response.num_tokens for response in responses], self._batch_tokens):
            found.update(zip(indices, self._read([texts[index] for index in indices]), strict=True))
        reads = [found[index] for index in range(len(responses))]
        shard = Shard(
            tokens=torch.tensor([t for one in responses for t in (*one.prompt, *one.response)], dtype=torch.int32),
            features=torch.cat([read.features for read in reads]),
            lengths=torch.tensor([response.num_tokens for response in responses]),
            prompts=torch.tensor([len(response.prompt) for response in responses]),
            temps=torch.tensor([response.temperature for response in responses]),
            top_ids=torch.cat([read.tops.ids for read in reads]),
            top_logprobs=torch.cat([read.tops.logprobs for read in reads]),
        )
        if not self.branches:
            return shard
        ids, logprobs = (torch.cat(values) for values in zip(*(read.branches for read in reads), strict=True))
        return replace(shard, branch_ids=ids, branch_logprobs=logprobs)

    def _read(self, texts: Sequence["_Text"]) -> list["_Read"]:
        """Run the texts, then their branches, one branch of every position at a time."""
        reads = list(self._run(texts))
        if not self.branches:
            return reads
        others = [
            read.tops.ids[:-1].gather(1, likeliest_others(read.tops.ids[:-1], torch.tensor(response), self.branches))
            for read, response in zip(reads, (text.tokens[text.prompt :] for text in texts), strict=True)
        ]
        branches = [
            list(self._run_branches(texts, [tokens[:, number] for tokens in others])) for number in range(self.branches)
        ]
        return [
            read._replace(branches=_Tops(*(torch.stack(values, dim=1) for values in zip(*mine, strict=True))))
            for read, mine in zip(reads, zip(*branches, strict=True), strict=True)
        ]

    def _run(self, texts: Sequence["_Text"]) -> Iterator["_Read"]:
        length = max(len(text.tokens) for text in texts)
        ids = _padded([torch.tensor(text.tokens) for text in texts])
        first = min(text.prompt for text in texts) - 1  # the position that predicts the first response token
        logits = self._logits(ids, torch.arange(first, length))
        for row, (tokens, prompt) in enumerate(texts):
            features = self._taps.take(len(tokens), row).to(torch.bfloat16).cpu()
            yield _Read(features, _Tops.of(logits[row, prompt - 1 - first : len(tokens) - first]))

    def _run_branches(self, texts: Sequence["_Text"], others: Sequence[Tensor]) -> Iterator["_Tops"]:
        """Distributions after these alternatives to each text's response tokens. # others [response] each"""
        ids, branched = _padded([torch.tensor(text.tokens) for text in texts]), _padded(others)
        length = ids.shape[1]
        parents = _padded([torch.arange(text.prompt - 1, len(text.tokens) - 1) for text in texts])
        rows = Rows.branched(length, parents.to(self._device))
        kept = torch.arange(length, length + branched.shape[1])
        logits = self._logits(torch.cat([ids, branched], dim=1), kept, rows)
        for row, tokens in enumerate(others):
            yield _Tops.of(logits[row, : len(tokens)])

    def _logits(self, ids: Tensor, kept: Tensor, rows: Rows | None = None) -> Tensor:
        """# ids [batch, rows], kept [logits] -> [batch, logits, vocab]"""
        attended: list[int] = []
        extra = {} if rows is None else {"rows": rows, "position_ids": rows.positions}
        output = self._model(
            input_ids=ids.to(self._device),
            use_cache=False,
            logits_to_keep=kept.to(self._device),
            attended=attended,
            **extra,
        )
        if attended != list(range(self._num_layers)):
            raise StartupError(
                "this model has layers whose attention is not one plain attention each; its features cannot be read"
            )
        logits: Tensor = output.logits
        return logits


class _Text(NamedTuple):
    tokens: list[int]
    prompt: int


class _Tops(NamedTuple):
    """The target's likeliest tokens."""

    ids: Tensor  # [..., TOP] int32
    logprobs: Tensor  # [..., TOP] float16

    @staticmethod
    def of(logits: Tensor) -> "_Tops":
        logits = logits.float()
        top = logits.topk(TOP)
        logprobs = top.values - logits.logsumexp(-1, keepdim=True)
        return _Tops(top.indices.to(torch.int32).cpu(), logprobs.to(torch.float16).cpu())


class _Read(NamedTuple):
    """Results of one text."""

    features: Tensor  # [length, taps * hidden]
    tops: _Tops  # [labels]
    branches: _Tops | None = None  # [response, branches]


def _padded(rows: Sequence[Tensor]) -> Tensor:
    return pad_sequence(list(rows), batch_first=True).long()


def write_shards(reader: FeatureReader, responses: Sequence[Response], folder: Path) -> Iterator[Sequence[Response]]:
    """Write the missing shards; yields the responses of each shard, existing ones included. Raises StartupError."""
    make_folder(folder)
    chunks = [responses[start : start + SHARD_SEQUENCES] for start in range(0, len(responses), SHARD_SEQUENCES)]
    paths = [folder / f"shard{number:05d}.safetensors" for number in range(len(chunks))]
    kept = [_holds(path, chunk, reader.branches) for path, chunk in zip(paths, chunks, strict=True)]
    missing = [chunk for is_kept, chunk in zip(kept, chunks, strict=True) if not is_kept]
    needed = sum(
        response.num_tokens * (reader.bytes_per_token + 4)
        + (len(response.response) * (1 + reader.branches) + 1) * _LABEL_BYTES
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
                    f"{path} cannot be written ({error}); free some space and start again: it goes on"
                ) from None
        yield chunk


def _holds(path: Path, responses: Sequence[Response], branches: int) -> bool:
    """Whether the shard holds all of these texts; it may hold only the first ones. Raises StartupError for others."""
    if not path.exists():
        return False
    try:
        with safe_open(path, framework="pt") as shard:
            tokens, lengths = shard.get_tensor("tokens"), shard.get_tensor("lengths")
            names = list(shard.keys())
            held = shard.get_slice("branch_ids").get_shape()[1] if "branch_ids" in names else 0
    except (OSError, SafetensorError) as error:
        raise StartupError(f"{path} cannot be read ({error}); delete it") from error
    wanted = [token for response in responses for token in (*response.prompt, *response.response)]
    if lengths.shape[0] > len(responses) or tokens.tolist() != wanted[: tokens.shape[0]]:
        raise StartupError(f"{path} holds other texts than these responses; give another folder or delete it")
    if held != branches:
        raise StartupError(
            f"{path} was made with --branches {held}, not {branches}; give that number or another folder"
        )
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
    branches: int = 0,
    deadline: float | None,
    loaded: LoadedModel | None = None,
    taps: Sequence[int] = (),
) -> None:
    """Run stage 2. After the deadline (time.monotonic()) no further shard is begun. `loaded`: the target, if it is
    there already; `taps`: of the drafter; empty: those of a new one. Raises StartupError."""
    wanted = read_responses(responses)
    device = device_of(config.device)
    loaded = loaded or load_target(config, device)
    size = sum(weight.numel() for weight in loaded.model.parameters()) * torch.float32.itemsize
    if size < psutil.virtual_memory().available and not bf16_is_faster(device):
        loaded.model.float()  # the same weights
    taps = taps or tap_layers_for(loaded.model)
    most = _CUDA_BATCH_TOKENS if device.type == "cuda" else _CPU_BATCH_TOKENS
    reader = FeatureReader(loaded.model, taps, batch_tokens=most, branches=branches)
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
    """The processes of this run, each on its device."""
    use_threads(config.num_threads)
    torch.set_num_threads(config.num_threads)  # training computes in torch
    device = local_device(device_of(config.device))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return join(device)
