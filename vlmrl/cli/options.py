"""Arguments and options that several commands share, each declared once. Each command sets its own defaults."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from vlmrl.errors import RecipeError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else there.")]
Runs = Annotated[Path | None, typer.Option("--runs", help="Folder of the runs; default: $VLMRL_RUNS, else ./runs.")]


def _with_values(texts: list[str] | None) -> list[str] | None:
    """Return the texts of `--set`. Raises: RecipeError for one without "=": its value is the next word, a recipe."""
    from vlmrl.recipe.load import Override, parse_override

    for text in texts or ():
        if "=" not in text and not isinstance(problem := parse_override(text), Override):
            raise RecipeError(problem.message, where=problem.where, hint=problem.hint)
    return texts


Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override one recipe key: --set optim.lr=1e-5. May be repeated.", callback=_with_values),
]
RecipeName = Annotated[str, typer.Argument(help="A TOML file, or the name of a shipped recipe.")]
RecipeFile = Annotated[Path, typer.Argument(help="Recipe file (TOML).")]
RunRef = Annotated[
    str, typer.Argument(metavar="RUN", help="The run: a unique prefix of its id, its name, `last`, or its folder.")
]
Debug = Annotated[
    bool,
    typer.Option(
        "--debug", help="Debug a reward of your own: breakpoint() works in it on this terminal, without a time limit."
    ),
]

# Options of `eval` and `generate`
AnsweringModel = Annotated[
    str | None,
    typer.Argument(help="Run (id, prefix, name, `last`), Hugging Face folder or hub name; none with --endpoint."),
]
RecipeOrRun = Annotated[
    str | None, typer.Option("--recipe", help="Recipe or run that gives data and reward; default: the run's own.")
]
OtherData = Annotated[
    str | None, typer.Option(help="Dataset to evaluate on instead of the recipe's: a folder or a table.")
]
OneSource = Annotated[str | None, typer.Option(help="Only this [[data]] entry, if the recipe has several.")]
EvalCheckpoint = Annotated[str, typer.Option(help="Checkpoint of a run: best, last, or a step.")]
Sample = Annotated[float | None, typer.Option("--sample", help="Sample at this temperature; default: greedy.", min=0.0)]
Samples = Annotated[int, typer.Option("--n", min=1, help="Responses per prompt; more than 1 needs --sample.")]
MaxRows = Annotated[int | None, typer.Option(min=1, help="Maximum number of rows of each source: the first ones.")]
EvalSeed = Annotated[int, typer.Option(min=0, help="Seed of sampling.")]
Endpoint = Annotated[
    str | None,
    typer.Option(
        "--endpoint",
        metavar="URL",
        help="Ask a server for the responses: address of an OpenAI-compatible endpoint, such as "
        "http://localhost:8000/v1.",
    ),
]
Served = Annotated[str | None, typer.Option("--model", help="Name of the model at the endpoint.")]
KeyEnv = Annotated[
    str | None, typer.Option("--key-env", metavar="NAME", help="Environment variable that holds the endpoint's key.")
]
Concurrency = Annotated[
    int, typer.Option("--concurrency", min=1, max=1024, help="Maximum number of requests to the endpoint at once.")
]

ModelGpus = Annotated[
    str | None,
    typer.Option(
        "--gpus",
        help="GPUs, one process with the whole model each: a count (4) or their numbers (0,2,5). Without a GPU: CPU "
        "processes. The results are the same as with one process.",
    ),
]

# Options of the commands of `vlmrl data`; `eval` has the second one, too
Dataset = Annotated[
    str, typer.Argument(help="The dataset: a prepared folder, a table file, a folder of tables, or hub:name.")
]
DataColumns = Annotated[
    str | None,
    typer.Option("--columns", help="Columns of a table that are not recognised: images=picture,answer=label."),
]
PromptTask = Annotated[
    str | None,
    typer.Option(
        "--task",
        help="Task that makes the prompts, a name or file.py:function; default: that of the recipe if there is one, "
        "else the dataset's own, unless that is a file.",
    ),
]

# Options of `train` and `sft`
TrainRecipe = Annotated[
    Path | None,
    typer.Argument(
        help="Recipe file (TOML). With --resume or --from: the recipe from now on; default: the recipe of that run."
    ),
]
Resume = Annotated[
    str | None,
    typer.Option(
        "--resume", help="Continue this run from its last checkpoint; for more steps add --set train.steps=N."
    ),
]
AcceptChanges = Annotated[
    bool,
    typer.Option(
        "--accept-changes", help="With --resume: continue even if what is learned changes. The change is recorded."
    ),
]
From = Annotated[
    str | None,
    typer.Option(
        "--from", help="Begin a new run with everything in a run's checkpoint: RUN@STEP, RUN@best, or RUN (the last)."
    ),
]
Name = Annotated[str | None, typer.Option("--name", help="Name of the run; commands accept it instead of the id.")]
Tag = Annotated[
    list[str] | None, typer.Option("--tag", help="Tag of the run, for `vlmrl runs list --tag`. May be repeated.")
]
Note = Annotated[str, typer.Option("--note", help="Note on the run, kept in its manifest.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print no line per step.")]
Gpus = Annotated[
    str | None,
    typer.Option(
        "--gpus", help="GPUs, one process each: a count (4) or their numbers (0,2,5). Without a GPU: CPU processes."
    ),
]
Nnodes = Annotated[
    int, typer.Option("--nnodes", min=1, help="Number of machines of this run; start the command on each.")
]
NodeRank = Annotated[
    int, typer.Option("--node-rank", min=0, help="Number of this machine, from 0; the others connect to machine 0.")
]
RendezvousEndpoint = Annotated[
    str | None, typer.Option("--rdzv-endpoint", help="HOST:PORT of machine 0, to which the machines connect.")
]
DebugRank = Annotated[
    int | None,
    typer.Option(
        "--debug-rank",
        min=0,
        help="Give this rank and its rewards the terminal: breakpoint() works in them, and nothing times out.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check, print the torchrun command that would run, and stop.")]


def typed_words(ctx: typer.Context) -> tuple[str, ...]:
    """Return the words that the user typed after `vlmrl` (kept by `cli/app.py`)."""
    return ctx.obj


def parse_columns(text: str | None) -> dict[str, str]:
    """Return the names of columns in `role=column,role=column`; {} for None. Raises: RecipeError."""
    columns: dict[str, str] = {}
    for item in (text or "").split(",") if text else ():
        role, sign, column = item.partition("=")
        if not sign or not role.strip() or not column.strip():
            raise RecipeError(f"--columns {text!r} is not of the form role=column,role=column")
        columns[role.strip()] = column.strip()
    return columns


Request = TypeVar("Request")


def request_of(request: type[Request], ctx: typer.Context, **more: Any) -> Request:
    """Return a request with the values of the command's options, by the names of its fields.

    Args:
        more: fields that are no option of the command. An option without a value has the field's default.
    """
    names = {one.name for one in fields(request)}  # type: ignore[arg-type]
    given = {name: value for name, value in ctx.params.items() if name in names and value is not None}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return request(**{**values, "argv": typed_words(ctx), **more})


def check_sampling(samples: int, temperature: float | None) -> None:
    """Raise a RecipeError for several responses per prompt without sampling."""
    if samples > 1 and not temperature:
        why = f"--n {samples} needs --sample: greedy gives the same answer {samples} times"
        raise RecipeError(why, hint="--sample 1.0")


def run_folder(run: str, runs: Path | None) -> Path:
    """Return the folder of a run. Raises: StoreError for a run that is not there, or several."""
    from vlmrl.store.layout import runs_root
    from vlmrl.store.listing import find

    return find(runs_root(runs), run)
