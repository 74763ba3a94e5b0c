"""`vlmrl generate`: write the responses of a model to dataset rows, without a grade."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from vlmrl.cli import options
from vlmrl.cli.output import emit, say, say_origin, show_warnings, tell
from vlmrl.cli.served import endpoint_of, served_origin
from vlmrl.cli.show.progress import counter
from vlmrl.errors import RecipeError
from vlmrl.visible import plural


def register(app: typer.Typer) -> None:
    app.command("generate", short_help="Write a model's responses to dataset rows.")(generate)


def generate(
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
    command goes on.
    """
    from vlmrl.inference.endpoint_responses import learn_key
    from vlmrl.inference.eval_recipe import choose_recipe
    from vlmrl.inference.evaluation import EvalSettings
    from vlmrl.inference.generate import generate as write_responses
    from vlmrl.inference.generate import rows_to_answer
    from vlmrl.setup.model_origin import find_model
    from vlmrl.setup.open_values import settle_for_answers
    from vlmrl.store.layout import runs_root

    if n > 1 and not sample:
        raise RecipeError(f"--n {n} needs --sample: greedy gives the same answer {n} times", hint="--sample 1.0")
    connection = endpoint_of(endpoint, served, key_env, concurrency, model=model, gpus=None)
    root = runs_root(runs)
    if connection is None:
        origin = find_model(str(model), root, int(checkpoint) if checkpoint.isdigit() else checkpoint)
    else:
        origin = served_origin(connection)
    chosen = choose_recipe(origin, root, recipe=recipe, data=data, overrides=list(overrides or ()))
    settled, warnings = (chosen.recipe, []) if connection else settle_for_answers(chosen.recipe, origin.files)
    show_warnings(warnings)
    sources = rows_to_answer(settled, split, max_rows, source)
    say_origin(str(model), origin.parent)
    for one in sources:
        say(f"{one.name}: {len(one.rows):,} rows, split {one.split}")
    with ExitStack() as stack:
        client = None
        if connection is not None:
            from vlmrl.endpoint.client import EndpointClient

            learn_key(connection.key_env)
            client = stack.enter_context(EndpointClient(connection, notify=say))
        done = write_responses(
            settled,
            origin,
            sources,
            root,
            out,
            EvalSettings(sample or None, n, None, seed, force),
            client,
            say=say,
            progress=counter("generating", sys.stderr),
        )
    facts = {"out": str(done.out), "rows": done.rows, "responses": done.responses, "refused": done.refused}
    emit(facts, as_json)
    if not as_json:
        tell(f"{done.out}: {done.responses:,} response{plural(done.responses)} to {done.rows:,} rows")
        if done.refused:
            say(f"warning: the endpoint refused {done.refused:,} of them; their lines have `refusal`")
