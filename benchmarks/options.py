"""Options that several experiments share."""

from pathlib import Path
from typing import Annotated

import typer

PromptFile = Annotated[
    Path, typer.Option("--prompts", metavar="FILE", help="JSONL file with messages, turns or prompt.")
]
PromptFiles = Annotated[
    list[Path],
    typer.Option("--prompts", metavar="FILE...", help="JSONL files with messages, turns or prompt in each line."),
]
MorePromptFiles = Annotated[list[Path] | None, typer.Argument(metavar="[FILE]...", help="More prompt files.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Only the first so many prompts of each file.")]
Temperature = Annotated[float, typer.Option(min=0, max=2, help="0 decodes greedily.")]
Temperatures = Annotated[
    list[float], typer.Option(min=0, max=2, help="0 decodes greedily. Give it again for more than one.")
]
AnswerTokens = Annotated[int, typer.Option(min=1, help="Length of each answer.")]
Concurrency = Annotated[int, typer.Option(min=1, help="Requests in flight at the same time.")]
Seed = Annotated[int, typer.Option(min=0, max=2**32, help="Seed of everything random.")]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Also write the result, with its conditions, as JSON.")
]
