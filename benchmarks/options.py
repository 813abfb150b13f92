"""An option that several experiments share beside those of `adaptree bench`."""

from pathlib import Path
from typing import Annotated

import typer

PromptFile = Annotated[
    Path, typer.Option("--prompts", metavar="FILE", help="JSONL file with messages, turns or prompt.")
]
