"""What a folder of features says of itself: for which target, from which files, whose prompts.

Fit refuses features of another target, and the drafter's card names the data by it.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from service.errors import StartupError
from service.training.prompts import source_of
from service.training.responses import Answered

MANIFEST_FILE = "features.json"


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


def describe(
    answered: Answered,
    files: Sequence[Path],
    *,
    target: str,
    target_identity: str,
    tap_layers: Sequence[int],
    shards: int,
) -> Manifest:
    """The manifest of features made from these responses."""
    responses = answered.responses
    return Manifest(
        target=target,
        target_identity=target_identity,
        tap_layers=tuple(tap_layers),
        files={file.name: sha256_of(file) for file in files},
        responses_by_source=_counted([source_of(response.id) for response in responses]),
        responses_by_task=_counted([response.task or "unknown" for response in responses]),
        responses_by_temperature=_counted([f"{response.temperature:g}" for response in responses]),
        response_tokens=answered.num_response_tokens,
        tokens=answered.num_tokens,
        shards=shards,
    )


def sha256_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _counted(names: Sequence[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))
