"""`vlmrl generate`: write the responses of a model to dataset rows or to images, without a grade."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlmrl.cli import options
from vlmrl.cli.eval import endpoint_of, joined, open_answering, origin_named, rows_line
from vlmrl.cli.output import emit, say, say_origin, show_warnings, tell
from vlmrl.cli.progress import counter
from vlmrl.untrusted import number_of, one_line, plural

if TYPE_CHECKING:
    from vlmrl.evaluate.eval import EvalSettings
    from vlmrl.evaluate.eval_rows import SeenRows
    from vlmrl.evaluate.generate import Answered
    from vlmrl.launch.request import GenerateRequest
    from vlmrl.recipe.schema import Recipe
    from vlmrl.services.client import EndpointOptions
    from vlmrl.setup.model_origin import ModelOrigin
    from vlmrl.tasks.source import Source


LEFT_OUT = 4
"""Exit code of a command that left out images."""
MOST_LINES = 5
"""Maximum number of images, or of reasons, that are listed."""


def show_generated(done: Answered, about_images: bool, as_json: bool) -> None:
    """Print the result. Raises: typer.Exit with code 4 when images were left out."""
    written = done.written
    facts: dict[str, Any] = {
        "out": str(done.out),
        "rows": done.rows,
        "responses": written.responses,
        "refused": written.refused,
        **({"repeated_rows": written.repeated} if written.repeated else {}),
    }
    if about_images:
        facts["left_out"] = [asdict(one) for one in written.left_out]
        facts |= {"files": written.files, "no_file": written.no_file, "not_drawn": written.not_drawn}
    if not emit(facts, as_json):
        to = f"{done.rows:,} image{plural(done.rows)}" if about_images else f"{done.rows:,} rows"
        tell(f"{done.out}: {written.responses:,} response{plural(written.responses)} to {to}")
        if written.files is not None:
            tell(f"{written.files:,} with {written.kind}")
            _reasons(f"without {written.kind}", written.no_file)
            _reasons("that cannot be drawn", written.not_drawn)
        if written.refused:
            say(f"warning: the endpoint refused {written.refused:,} of them; their lines have `refusal`")
    if written.repeated:
        rows = f"warning: {number_of(written.repeated, 'row')} equal to an earlier one"
        say(f"{rows}: same prompt_id, seeds and responses, as in eval; reward-check takes them as one group")
    if written.left_out:
        count = len(written.left_out)
        say(f"warning: {count:,} image{plural(count)} left out:")
        for one in written.left_out[:MOST_LINES]:
            say(f"  {one_line(one.image)}: {one_line(one.reason)}")
        if count > MOST_LINES:
            say(f"  ... and {count - MOST_LINES:,} more")
        raise typer.Exit(LEFT_OUT)


def _reasons(what: str, numbers: Mapping[str, int]) -> None:
    """Print how many responses lack something, and why; the most frequent reasons first."""
    if not numbers:
        return
    tell(f"{sum(numbers.values()):,} {what}:")
    ordered = sorted(numbers.items(), key=lambda item: (-item[1], item[0]))
    for reason, count in ordered[:MOST_LINES]:
        tell(f"  {count:,}: {one_line(reason)}")
    if len(ordered) > MOST_LINES:
        tell(f"  ... and {len(ordered) - MOST_LINES:,} more reasons")


FOR_IMAGES = "Only with --images."


def register(app: typer.Typer) -> None:
    app.command("generate", short_help="Write a model's responses to dataset rows, or to your images.")(generate)


def generate(
    ctx: typer.Context,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            help="File to write: one JSON object per response. With --images: a new folder, or a file that ends in "
            ".jsonl.",
        ),
    ],
    model: options.AnsweringModel = None,
    image_paths: Annotated[
        list[str] | None,
        typer.Option(
            "--images",
            metavar="PATH",
            help="Answer images instead of dataset rows: one image, or a folder with all folders in it. May be "
            "repeated.",
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help=f"Task whose prompt is used, a name or file.py:function; default: that of the recipe. {FOR_IMAGES}"
        ),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help=f"Text to ask about each image, instead of the task's prompt. {FOR_IMAGES}")
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(metavar="FILE", help=f"Jinja file with the prompt, as `prompt` in [[data]]. {FOR_IMAGES}"),
    ] = None,
    recipe: options.RecipeOrRun = None,
    data: options.OtherData = None,
    split: Annotated[
        str | None,
        typer.Option(help="Split, or table file such as rows.jsonl; default: test, else the split of the recipe."),
    ] = None,
    source: options.OneSource = None,
    checkpoint: options.EvalCheckpoint = "best",
    temperature: options.Sample = None,
    samples: options.Samples = 1,
    max_rows: options.MaxRows = None,
    seed: options.EvalSeed = 0,
    overrides: options.Set = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file or folder if it exists.")] = False,
    gpus: options.ModelGpus = None,
    endpoint: options.Endpoint = None,
    served: options.Served = None,
    key_env: options.KeyEnv = None,
    concurrency: options.Concurrency = 16,
    runs: options.Runs = None,
    as_json: options.Json = False,
) -> None:
    """Write the responses of a run, a model or an endpoint to dataset rows or to images, without a grade.

    Example: vlmrl generate last --split test --out answers.jsonl

    Example: vlmrl generate last --images scans/ --task figures --out drawn

    Example: vlmrl generate Qwen/Qwen2.5-VL-3B-Instruct --images a.png --prompt "What is this?" --out a.jsonl

    Each line has prompt_id, source, sample, response, finish, num_tokens, seed, group and ground_truth: `vlmrl
    reward-check` grades such a file. Sampling is greedy unless --sample is given.

    With --images, prompt_id is the path of the image. The prompt is that of --task, else that of the recipe or the
    run. A folder has responses.jsonl and, if the task says that responses are files, such as SVG code, one file per
    response under the name of the image, with a picture beside it. Images that cannot be read are left out and listed;
    the exit code is then 4.

    Responses are kept as they come, and the file or folder appears when all are there. After a kill or an outage, the
    same command goes on; an image that changed meanwhile is asked again. Another number of processes begins anew.

    With --gpus, the rows are shared, and the file is in their order. A model that needs several GPUs is cut into parts
    by --set rollout.tensor_parallel=N (engine vLLM); --gpus is then a multiple of N.
    """
    from vlmrl.dist.world import launched
    from vlmrl.launch.request import GenerateRequest
    from vlmrl.store.layout import runs_root

    options.check_sampling(samples, temperature)
    connection = endpoint_of(endpoint, served, key_env, concurrency, model=model, gpus=gpus)
    request = options.request_of(GenerateRequest, ctx, model=model or str(served))
    request.check()
    root = runs_root(runs)
    origin = origin_named(request, connection, root)
    # Imported here: a wrong name is reported before large libraries are loaded.
    from vlmrl.evaluate.eval import EvalSettings
    from vlmrl.evaluate.generate import require_free

    require_free(out, force, image_paths or None)
    settings = EvalSettings(temperature or None, samples, None, seed, force)
    chosen, filled, warnings = open_answering(request, origin, root)
    answered = _sources(filled, request, chosen.seen)
    sources = [one for one, _ in answered]
    if launched():
        _generate(connection, filled, origin, sources, root, out, settings)
        return
    show_warnings(warnings)
    say_origin(request.model, origin.parent)
    for _, line in answered:
        say(line)
    done = None if gpus is None else _on_ranks(request, filled, root, sources)
    if done is None:
        done = _generate(connection, filled, origin, sources, root, out, settings)
    show_generated(done, bool(image_paths), as_json)


def _sources(recipe: Recipe, request: GenerateRequest, seen: SeenRows) -> list[tuple[Source, str]]:
    """Return the rows to answer, and a line about them."""
    from vlmrl.dist.world import stderr
    from vlmrl.evaluate.generate import images_to_answer, rows_to_answer
    from vlmrl.tasks.image_source import Question

    if not request.image_paths:
        rows = rows_to_answer(recipe, seen, request.split, request.max_rows, request.source)
        return [(one.source, rows_line(one)) for one in rows]
    question = Question(request.task, request.prompt, request.template, request.source)
    progress = counter("reading images", stderr())
    one = images_to_answer(recipe, request.image_paths, question, request.max_rows, request.out, progress)
    return [(one, f"{one.name}: {len(one.rows):,}, task {one.task.name}")]


def _on_ranks(request: GenerateRequest, recipe: Recipe, root: Path, sources: Sequence[Source]) -> Answered | None:
    """Generate in several processes. Return None if this process must generate."""
    from vlmrl.evaluate.generate import Answered, take_result
    from vlmrl.launch.start import generate_on_ranks

    take_result(root, request.out)  # of an attempt whose launcher was killed
    code = generate_on_ranks(str(request.gpus), request, recipe, root, say)
    if code:
        raise typer.Exit(code)
    if code is None:
        return None
    return Answered(request.out, sum(len(one.rows) for one in sources), take_result(root, request.out))


def _generate(
    connection: EndpointOptions | None,
    recipe: Recipe,
    origin: ModelOrigin,
    sources: Sequence[Source],
    root: Path,
    out: Path,
    settings: EvalSettings,
) -> Answered:
    """Generate in this process, which is either the only one or a rank of a launcher, or let an endpoint generate."""
    from vlmrl.evaluate.generate import generate as write_responses

    with joined(recipe, connection, "generating") as (world, client, tell_user, progress):
        return write_responses(
            recipe, origin, sources, root, out, settings, client, say=tell_user, progress=progress, world=world
        )
