"""What a learning folder says of the drafter that learns in it, so that whoever reads its snapshots needs neither the
target nor the drafter that was deployed."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adaptation.checkpoint import sync_folder, write_synced
from adaptation.records import Damaged, NotStored
from drafters.specblock.config import SpecBlockConfig, config_from

DRAFTER_FILE = "drafter.json"
_UNFINISHED = ".unfinished-"


@dataclass(frozen=True, slots=True)
class Origin:
    """Whom snapshots are for, and what they were learnt from."""

    target_identity: str  # as in the folders of drafters
    config: SpecBlockConfig
    model: str | None = None  # the target as `source_of` names it; None: not known
    origin_sha256: str | None = None  # of the deployed drafter's weights; None: there was none


def write_origin(folder: Path, origin: Origin) -> None:
    """Raises NotStored, and then the file is as it was."""
    told: dict[str, Any] = {
        "target_identity": origin.target_identity,
        "drafter": origin.config.described,
        "model": origin.model,
        "origin_sha256": origin.origin_sha256,
    }
    data = (json.dumps(told, indent=2, sort_keys=True) + "\n").encode()
    unfinished = folder / f"{_UNFINISHED}{DRAFTER_FILE}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_synced(unfinished, data)
        unfinished.replace(folder / DRAFTER_FILE)
        sync_folder(folder)
    except OSError as error:
        raise NotStored(f"{DRAFTER_FILE} could not be stored in {folder}: {error}") from error


def read_origin(folder: Path) -> Origin | None:
    """None where the folder does not say. Raises Damaged."""
    try:
        told: dict[str, Any] = json.loads((folder / DRAFTER_FILE).read_text())
        config = config_from(told["drafter"])
        return Origin(str(told["target_identity"]), config, told.get("model"), told.get("origin_sha256"))
    except FileNotFoundError:
        return None
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise Damaged(f"{DRAFTER_FILE} does not describe a drafter: {error}") from error
