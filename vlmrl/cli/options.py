"""Arguments and options that several commands share, each declared once. The commands set the defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")]
Runs = Annotated[
    Path | None,
    typer.Option("--runs", help="Folder of the runs; default: $VLMRL_RUNS, else ./runs.", show_default=False),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override one recipe key: --set optim.lr=1e-5. May be repeated.", show_default=False),
]
RecipeName = Annotated[str, typer.Argument(help="A TOML file, or the name of a shipped recipe.")]
RecipeFile = Annotated[Path, typer.Argument(help="Recipe file (TOML).")]
RunRef = Annotated[
    str, typer.Argument(metavar="RUN", help="A unique prefix of its id, its name, `last`, or its folder.")
]
Debug = Annotated[
    bool,
    typer.Option(
        "--debug", help="Give a reward of your own the terminal: breakpoint() works in it, and it has no time limit."
    ),
]

# Options of the commands of `vlmrl data`
Dataset = Annotated[str, typer.Argument(help="A prepared folder, a table file, a folder of tables, or hub:name.")]
PromptTask = Annotated[
    str | None,
    typer.Option(
        "--task",
        help="Task whose prompt is shown, by name or as file.py:function; default: the dataset's own, unless that is "
        "a file.",
    ),
]

# Options of `train` and `sft`
TrainRecipe = Annotated[
    Path | None,
    typer.Argument(
        help="Recipe file (TOML). With --resume or --from: the recipe from now on; default: the run's own.",
        show_default=False,
    ),
]
Resume = Annotated[
    str | None,
    typer.Option(
        "--resume",
        help="Go on with this run from its last checkpoint, also with more steps: --set train.steps=...",
        show_default=False,
    ),
]
AcceptChanges = Annotated[
    bool, typer.Option("--accept-changes", help="With --resume: go on although what is learned changes; recorded.")
]
From = Annotated[
    str | None,
    typer.Option(
        "--from",
        help="A new run that goes on from all of a run's checkpoint: RUN@STEP, RUN@best, RUN (the last).",
        show_default=False,
    ),
]
Name = Annotated[
    str | None, typer.Option("--name", help="A name; commands accept it instead of the id.", show_default=False)
]
Tag = Annotated[
    list[str] | None,
    typer.Option("--tag", help="A tag for `vlmrl runs list --tag`. May be repeated.", show_default=False),
]
Note = Annotated[str, typer.Option("--note", help="A sentence for yourself, kept in the manifest.", show_default=False)]
Quiet = Annotated[bool, typer.Option("--quiet", help="No line per step.")]
Gpus = Annotated[
    str | None,
    typer.Option(
        "--gpus",
        help="GPUs, one process each: a number (4) or which (0,2,5). Without a GPU: CPU processes.",
        show_default=False,
    ),
]
Nnodes = Annotated[int, typer.Option("--nnodes", min=1, help="Machines of this run; start the command on each.")]
NodeRank = Annotated[
    int, typer.Option("--node-rank", min=0, help="Number of this machine, from 0; machine 0 is the meeting point.")
]
RendezvousEndpoint = Annotated[
    str | None,
    typer.Option("--rdzv-endpoint", help="HOST:PORT where the machines meet: machine 0.", show_default=False),
]
DebugRank = Annotated[
    int | None,
    typer.Option(
        "--debug-rank",
        min=0,
        help="This rank gets the terminal, and its rewards too: breakpoint() works there, and nothing times out.",
        show_default=False,
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check, print the torchrun line that would run, and stop.")]


def typed_words(ctx: typer.Context) -> tuple[str, ...]:
    """Return the words that the user typed after `vlmrl` (kept by `cli/app.py`)."""
    return ctx.obj
