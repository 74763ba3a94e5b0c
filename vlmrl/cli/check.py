"""`vlmrl check`: find the problems of a recipe, its data and this machine, and show the plan of the run.

The memory plan has a line per phase and its largest parts, and changes that make the run fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from vlmrl.cli import options
from vlmrl.cli.output import console, draw_plain_table, emit, shorten
from vlmrl.errors import Problem, gib
from vlmrl.untrusted import number_of, one_line, visible

SHOWN_PARTS = 5
"""Number of parts that are listed per phase, the largest first."""


def show_memory(plan: Mapping[str, Any]) -> None:
    """Print a plan of `setup/memory_plan.py`, given as JSON values."""
    from rich.text import Text

    out = console(stderr=False)
    out.print(Text(f"\nmemory  {_title(plan)}", style="bold"))
    rows = []
    for phase in plan["phases"]:
        where = " (engine GPUs)" if phase["on"] == "engine" else ""
        full = phase["bytes"] > plan["bytes_each"]
        share = Text(f"{phase['bytes'] / max(1, plan['bytes_each']):.0%}", style="bold red" if full else "")
        rows.append((phase["phase"] + where, gib(phase["bytes"]), share, _parts(phase["parts"])))
    draw_plain_table(rows, ("phase", "needs", "share", "largest parts"))
    if plan["device"] != "this machine":
        for phase in plan["host"]:
            have = "" if plan["host_bytes"] is None else f" of {gib(plan['host_bytes'])}"
            out.print(Text(f"main memory, {phase['phase']}: {gib(phase['bytes'])}{have}: {_parts(phase['parts'])}"))
    if plan["kv_cache"]:
        needed = f"; all responses of a step at once need {gib(plan['kv_cache_needed'])}"
        out.print(Text(f"vLLM's cache: {gib(plan['kv_cache'])} per GPU{needed}"))
    for note in plan["notes"]:
        out.print(Text(note))
    if not plan["measured_prompts"]:
        out.print(Text("prompts were not measured: planned for the longest that rollout.max_prompt_tokens allows"))
    for number, change in enumerate(plan["changes"]):
        text = Text("fits with  " if number == 0 else "or         ", style="bold")
        out.print(text + Text(f"{change['words']}   ({change['costs']}; then at most {gib(change['peak'])})"))


def _title(plan: Mapping[str, Any]) -> str:
    count = plan["processes"]
    if plan["device"] == "this machine":
        each = "" if count == 1 else f", shared by {count} processes"
        whole = plan["bytes_each"] * count
        need = f"needs {gib(plan['peak'] * count)} of {gib(whole)} of main memory{each}"
        need += " (estimated, without Python and its libraries)"
        return f"{'fits' if plan['fits'] else 'does not fit'}: {need}"
    train = f"{plan['trainers']} train, {plan['engines']} generate" if plan["engines"] else "each trains and generates"
    fits = "does not fit" if not plan["fits"] else "fits, barely" if plan["tight"] else "fits"
    return f"{fits}: {count} x {plan['device']} with {gib(plan['bytes_each'])}; {train} (per GPU, estimated)"


def _parts(parts: Mapping[str, int]) -> str:
    largest = sorted(parts.items(), key=lambda item: -item[1])
    named = [f"{name} {gib(size)}" for name, size in largest[:SHOWN_PARTS]]
    rest = sum(size for _, size in largest[SHOWN_PARTS:])
    return ", ".join([*named, f"others {gib(rest)}"] if rest else named)


MAX_RESPONSE = 160
"""Maximum number of characters of a correct response that are shown."""


MAX_STREAM = 4000
"""Maximum number of characters of a part of an episode that are shown."""
STREAM_MARK = "\n... (the rest is not shown)"


def show_parity(parity: Mapping[str, Any]) -> None:
    from vlmrl.redaction.redact import excerpt

    allowed = parity["tolerance"]
    gradient = parity["gradient_note"] if parity["gradient"] is None else f"{parity['gradient']:.1e}"
    lines = [
        ("deep", f"{parity['path']}; {parity['dtype']}; compared with the model's own forward of each response alone"),
        (
            "",
            f"log-prob difference at most {parity['logp_max']:.1e} nats (allowed {allowed['logp_max']:g}); "
            f"gradient {gradient} (allowed {allowed['gradient']:g})",
        ),
        ("", f"allowed because {allowed['why']}"),
    ]
    if parity["sampler_gap"] is not None:
        lines.append(("", f"built-in engine and trainer differ by at most {parity['sampler_gap']:.1e} nats"))
    for row in parity["rows"]:
        lengths = "+".join(map(str, row["response_tokens"]))
        sizes = f"{row['prompt_tokens']} tokens ({row['image_tokens']} of images), responses {lengths}"
        words = "" if row["agrees"] else "  DISAGREES"
        lines.append(("", f"{row['row']}: {sizes}: {row['logp_max']:.1e}{words}"))
    if parity["stream"] and sum(author == "policy" for author, _ in parity["stream"]) == 1:
        lines.append(("", "no response called a tool: the tools did not run"))
    for author, text in parity["stream"]:
        lines.append((author, visible(excerpt(text, MAX_STREAM, mark=STREAM_MARK))))
    draw_plain_table(lines)


def _plan_lines(plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, data in plan.get("data", {}).items():
        others = "".join(f", {split} {other['rows']:,}" for split, other in data["other_splits"].items())
        task = data["task"] + (f", variant {data['variant']}" if data["variant"] else "")
        yield f"data {name}", f"{data['split']} {data['rows']:,} rows{others}; {data['images']:,} images; task {task}"
        if data.get("truth"):
            yield "", f"types of the truth: {visible(one_line(data['truth']))}"
        if environment := data.get("environment"):
            given = ", ".join(environment["given"]) or "nothing"
            why = environment["repeated"]
            kept_back = ", ".join(f"{n} ({why[n]})" if n in why else n for n in environment["kept_back"]) or "nothing"
            text = f"{', '.join(environment['tools'])}; reset gets of a row: {given}; kept back from it: {kept_back}"
            yield f"tools {name}", visible(one_line(text))
            if note := environment.get("note"):
                yield "", visible(one_line(note))
    for name, prompts in plan.get("prompts", {}).items():
        yield from _prompt_lines(name, prompts)
    for name, boxes in plan.get("boxes", {}).items():
        yield from _box_lines(name, boxes)
    for name, reward in plan.get("reward", {}).items():
        weights = ", ".join(f"{part} {weight:g}" for part, weight in reward["weights"].items()) or "no weights"
        profile = f" (profile {reward['profile']})" if reward["profile"] else ""
        yield f"reward {name}", f"{reward['name']}{profile}: {weights}"
        if reward["accuracy"]:
            yield "", f"accuracy: {reward['accuracy']}"
        scores = [f"{label} {reward[key]:.3g}" for label, key in _ANSWERS if reward[key] is not None]
        if scores:
            most = "" if reward["largest"] is None else f"; the maximum is {reward['largest']:g}"
            yield "", f"{', '.join(scores)}{most}"
    for name, text in plan.get("demonstrations", {}).items():
        yield "demonstrations", f"{name}: {text}"
    for name, facts in plan.get("services", {}).items():
        yield f"service {name}", str(facts["line"])
    if "run" in plan:
        yield "run", _run_line(plan["run"])
        epochs = ", ".join(f"{name} {epochs:.2f}" for name, epochs in plan["run"]["epochs"].items())
        yield "", f"passes over the data: {epochs or 'not known'}; {plan['run']['validations']} validations"
    yield from _machine_lines(plan)


_ANSWERS = (("a right answer earns", "correct_response"), ("an empty response earns", "empty_response"))


def _prompt_lines(name: str, prompts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    images = f", {prompts['image_tokens_mean']:.0f} of them image tokens" if prompts["images"] else ""
    yield (
        f"prompts {name}",
        f"{prompts['tokens_mean']:.0f} tokens on average{images}; longest {prompts['tokens_max']:,}",
    )
    most = max(count for _, _, count in prompts["histogram"])
    if len(prompts["histogram"]) > 1:
        for low, high, count in prompts["histogram"]:
            yield "", f"{low:>7,} - {high:<7,} {'#' * round(30 * count / most)} {count}"
    if prompts["images"]:
        sizes = " to ".join([prompts["image_sizes"][0], *prompts["image_sizes"][1:][-1:]])
        resized = f"{prompts['images_enlarged']} enlarged, {prompts['images_shrunk']} shrunk of {prompts['images']}"
        yield "", f"images as the model sees them: {sizes}; {resized} sampled images"


def _box_lines(name: str, boxes: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    from vlmrl.tasks.positions import COLOUR_WORDS

    yield f"boxes {name}", f"declared in the space `{boxes['space']}`: {boxes['meaning']}"
    if boxes["overlap"] is not None:
        response = shorten(one_line(boxes["correct_response"]), MAX_RESPONSE)
        yield "", f"a correct response is read with an IoU of {boxes['overlap']:.2f}, such as {response}"
    if boxes["pictures"]:
        folder = Path(boxes["pictures"][0]).parent
        look = "look whether the boxes surround the objects"
        yield "", f"{len(boxes['pictures'])} pictures ({COLOUR_WORDS}) in {folder}: {look}"


def _run_line(run: Mapping[str, Any]) -> str:
    checkpoints = number_of(run["checkpoints"], "checkpoint")
    if "responses" not in run:
        return f"{number_of(run['steps'], 'step')} x {number_of(run['rows_per_step'], 'row')}; {checkpoints}"
    return (
        f"{number_of(run['steps'], 'step')} x {number_of(run['prompts_per_step'], 'prompt')} x "
        f"{number_of(run['samples_per_prompt'], 'sample')} = {number_of(run['responses'], 'response')}, "
        f"{number_of(run['updates'], 'update')}, {checkpoints}"
    )


def _machine_lines(plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if "model" not in plan:
        return
    model, disk = plan["model"], plan["disk"]
    yield (
        "model",
        f"{model['type']}, {model['parameters'] / 1e6:,.1f} M parameters, {model['trained'] / 1e6:,.1f} M trained",
    )
    from vlmrl.setup.auto_choice import choice_texts
    from vlmrl.setup.check import FLASH_NAMES

    yield from (("chosen", text) for text in choice_texts(plan.get("chosen", [])))
    if attention := plan.get("attention"):
        text, images = attention["text"], attention["images"]
        yield "attention", text if text == images else f"{text}; for images {images}"
        if attention["missing"]:
            yield "", f"flash-attn would be used instead if it were installed: {attention['missing']}"
        for name in attention["unused"]:
            known = FLASH_NAMES[name]
            yield "", f"{known} is installed, not used: not yet run on a GPU (--set model.attention={name})"
    most = disk["rollouts_bytes_at_most"]
    rollouts = f"at most {gib(most)}" if most >= 1 << 20 else "below 1 MiB"
    checkpoints = number_of(disk["checkpoints_at_once"], "checkpoint")
    yield (
        "disk",
        f"{checkpoints} of {gib(disk['checkpoint_bytes'])} at a time, rollouts {rollouts}, merged model "
        f"{gib(disk['merged_bytes'])}; {gib(disk['free_bytes'])} free in {disk['folder']}",
    )


def show_problems(problems: Sequence[Problem], shown: Sequence[Problem] = ()) -> None:
    """Print the problems, errors first, and their number. `shown`: problems that are already printed."""
    from rich.text import Text

    show_each([p for p in problems if p not in shown])
    counts = [(sum(p.level == level for p in problems), level) for level in ("error", "warning")]
    words = ", ".join(number_of(n, level) for n, level in counts if n) or "no problems"
    console(stderr=False).print(Text(f"\n{words}"))


def show_each(problems: Sequence[Problem]) -> None:
    from rich.text import Text

    from vlmrl.errors import format_error

    out = console(stderr=False)
    for p in sorted(problems, key=lambda p: p.level != "error"):
        text = Text("\n" + visible(format_error(p.message, p.where, p.hint, p.level)))
        text.stylize("bold red" if p.level == "error" else "bold yellow", 1, 2 + len(p.level))
        out.print(text)


def register(app: typer.Typer) -> None:
    app.command("check", short_help="Find all problems before training.")(check)


def check(
    recipe: options.RecipeName,
    overrides: options.Set = None,
    runs: options.Runs = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Also load the model, and compare packed rows with its own forward pass.")
    ] = False,
    deep_prompts: Annotated[int, typer.Option(min=1, help="With --deep: number of prompts, 3 responses each.")] = 4,
    gpus: Annotated[
        str | None, typer.Option(help="Plan for this number of GPUs, as `train --gpus`; default: one process.")
    ] = None,
    nnodes: options.Nnodes = 1,
    gpu_memory: Annotated[
        str | None,
        typer.Option(help="Plan for other GPUs than this machine's: GiB (80), a name (H100) or a MIG slice (3g.40gb)."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Check a recipe, its data and this machine, and show the plan of the run. Exit code 2 if it cannot run.

    Example: vlmrl check recipes/digits_im.toml --set train.steps=200

    Example: vlmrl check fungi_im --gpus 8 --gpu-memory H100

    The memory plan is an estimate. It says what each GPU holds in each phase of a run. If that does not fit, it names
    the smallest change that makes it fit.

    --deep takes a few of your rows, packed as in training, and compares their log-probs and gradients with the model's
    own forward pass of each response alone. If rows disagree, it names them, and the exit code is 2. Whether the
    largest packed row fits in memory is tested by `train` and `sft` before their first step.
    """
    from vlmrl.evaluate.full_check import check_everything
    from vlmrl.store.layout import runs_root

    result = check_everything(
        recipe,
        overrides or [],
        runs_root(runs),
        gpus=gpus,
        nnodes=nnodes,
        gpu_memory=gpu_memory,
        deep_prompts=deep_prompts if deep else None,
        show_first=(lambda problems: None) if as_json else show_each,
    )
    is_ok = not any(p.level == "error" for p in result.problems)
    problems = [{"level": p.level, "message": p.message, "where": p.where, "hint": p.hint} for p in result.problems]
    fields = {"ok": is_ok, "recipe": recipe, "problems": problems, "plan": result.plan}
    if not emit(fields | ({"deep": result.parity} if deep else {}), as_json):
        draw_plain_table(_plan_lines(result.plan))
        if "memory" in result.plan:
            show_memory(result.plan["memory"])
        if result.parity is not None:
            show_parity(result.parity)
        show_problems(result.problems, shown=result.shown)
    if not is_ok:
        raise typer.Exit(2)
