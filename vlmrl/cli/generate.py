"""`vlmrl generate`: write the responses of a model to dataset rows, without a grade."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlmrl.cli import options
from vlmrl.cli.answering import endpoint_of, open_answering
from vlmrl.cli.output import emit, say, say_origin, show_warnings, tell
from vlmrl.cli.show.progress import counter
from vlmrl.errors import RecipeError
from vlmrl.visible import plural

if TYPE_CHECKING:
    from vlmrl.endpoint.client import EndpointOptions
    from vlmrl.inference.evaluation import EvalSettings
    from vlmrl.inference.generate import Answered
    from vlmrl.launch.request import GenerateRequest
    from vlmrl.recipe.schema import Recipe
    from vlmrl.setup.model_origin import ModelOrigin
    from vlmrl.tasks.source import Source


def register(app: typer.Typer) -> None:
    app.command("generate", short_help="Write a model's responses to dataset rows.")(generate)


def generate(
    ctx: typer.Context,
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write: one JSON object per response.")],
    model: options.AnsweringModel = None,
    recipe: options.RecipeOrRun = None,
    data: options.OtherData = None,
    split: Annotated[
        str | None, typer.Option(help="Split; default: test, else the split of the recipe.", show_default=False)
    ] = None,
    source: options.OneSource = None,
    checkpoint: options.EvalCheckpoint = "best",
    sample: options.Sample = None,
    n: options.Samples = 1,
    max_rows: options.MaxRows = None,
    seed: options.EvalSeed = 0,
    overrides: options.Set = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    gpus: options.ModelGpus = None,
    endpoint: options.Endpoint = None,
    served: options.Served = None,
    key_env: options.KeyEnv = None,
    concurrency: options.Concurrency = 16,
    runs: options.Runs = None,
    as_json: options.Json = False,
) -> None:
    """Write the responses of a run, a model or an endpoint to dataset rows, without a grade.

    Example: vlmrl generate last --split test --out answers.jsonl

    Each line has prompt_id, source, sample, response, finish, num_tokens, seed, group and ground_truth: `vlmrl
    reward-check` grades such a file. Sampling is greedy unless --sample is given.

    Responses are kept as they come, and the file appears when all are there. After a kill or an outage, the same
    command goes on. Another number of processes begins anew.

    With --gpus, the rows are shared, and the file is in their order. A model that needs several GPUs is cut into parts
    by --set rollout.tensor_parallel=N (engine vLLM); --gpus is then a multiple of N.
    """
    from vlmrl.dist.rank_process import launched
    from vlmrl.inference.evaluation import EvalSettings
    from vlmrl.inference.generate import Answered, require_free, rows_to_answer
    from vlmrl.launch.request import GenerateRequest
    from vlmrl.store.layout import runs_root

    if n > 1 and not sample:
        raise RecipeError(f"--n {n} needs --sample: greedy gives the same answer {n} times", hint="--sample 1.0")
    connection = endpoint_of(endpoint, served, key_env, concurrency, model=model, gpus=gpus)
    require_free(out, force)
    root, settings = runs_root(runs), EvalSettings(sample or None, n, None, seed, force)
    request = GenerateRequest(
        model=model or str(served),
        out=out,
        recipe=recipe,
        data=data,
        split=split,
        source=source,
        checkpoint=checkpoint,
        temperature=sample,
        samples=n,
        max_rows=max_rows,
        seed=seed,
        overrides=tuple(overrides or ()),
        force=force,
        gpus=gpus,
        runs=runs,
        argv=options.typed_words(ctx),
    )
    origin, _, settled, warnings = open_answering(request, connection, root)
    sources = rows_to_answer(settled, split, max_rows, source)
    if launched():
        _generate(settled, origin, sources, root, out, settings)
        return
    show_warnings(warnings)
    say_origin(request.model, origin.parent)
    for one in sources:
        say(f"{one.name}: {len(one.rows):,} rows, split {one.split}")
    if gpus is not None and _on_ranks(request, settled, root):
        rows = sum(len(one.rows) for one in sources)
        _show(Answered(out, rows, rows * n), as_json)
        return
    if connection is None:
        done = _generate(settled, origin, sources, root, out, settings)
    else:
        done = _ask(connection, settled, origin, sources, root, out, settings)
    _show(done, as_json)


def _on_ranks(request: GenerateRequest, recipe: Recipe, root: Path) -> bool:
    """Generate in several processes. Return False if this process must generate."""
    from vlmrl.launch.answer_ranks import generate_on_ranks

    code = generate_on_ranks(str(request.gpus), request, recipe, root, say)
    if code:
        raise typer.Exit(code)
    return code is not None


def _generate(
    recipe: Recipe, origin: ModelOrigin, sources: Sequence[Source], root: Path, out: Path, settings: EvalSettings
) -> Answered:
    """Generate in this process, which is either the only one or a rank of a launcher."""
    from vlmrl.dist.rank_process import stderr
    from vlmrl.dist.world import join_world
    from vlmrl.inference.generate import generate as write_responses

    with join_world(recipe.model.device, recipe.parallel.timeout_seconds) as world:
        progress: Callable[[int, int], None] = counter("generating", stderr()) if world.is_main else _silent
        tell_user = say if world.is_main else _silent
        return write_responses(
            recipe, origin, sources, root, out, settings, say=tell_user, progress=progress, world=world
        )


def _ask(
    connection: EndpointOptions,
    recipe: Recipe,
    origin: ModelOrigin,
    sources: Sequence[Source],
    root: Path,
    out: Path,
    settings: EvalSettings,
) -> Answered:
    """Let an endpoint generate."""
    from vlmrl.endpoint.client import EndpointClient
    from vlmrl.inference.endpoint_responses import learn_key
    from vlmrl.inference.generate import generate as write_responses

    learn_key(connection.key_env)
    progress = counter("generating", sys.stderr)
    with EndpointClient(connection, notify=say) as client:
        return write_responses(recipe, origin, sources, root, out, settings, client, say=say, progress=progress)


def _silent(*words: Any) -> None:
    pass


def _show(done: Answered, as_json: bool) -> None:
    facts = {"out": str(done.out), "rows": done.rows, "responses": done.responses, "refused": done.refused}
    emit(facts, as_json)
    if not as_json:
        tell(f"{done.out}: {done.responses:,} response{plural(done.responses)} to {done.rows:,} rows")
        if done.refused:
            say(f"warning: the endpoint refused {done.refused:,} of them; their lines have `refusal`")
