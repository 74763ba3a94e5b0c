"""Report about one or several runs: one HTML file that contains all its images and styles and loads no other file.

A run opens with whether it learned, what `runs diagnose` found, and what it cost.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from vlmrl.data.run_images import run_images
from vlmrl.diagnose.run import diagnose
from vlmrl.diagnose.run_facts import with_update
from vlmrl.errors import StoreError, VlmrlError
from vlmrl.evaluate.over_training import is_finite
from vlmrl.evaluate.paired import Comparison, overall, signed
from vlmrl.evaluate.records import read_evaluation
from vlmrl.redaction.redact import redact_text, redact_value
from vlmrl.report import curves
from vlmrl.report.curves import LEADING, Changes, RunCurves, validated_ends
from vlmrl.report.evaluations import EvalColumn, eval_columns, eval_tables, step_notes, validation_changes, view_epochs
from vlmrl.report.page_parts import legend, number, render, shown_pictures, write_page
from vlmrl.report.rollout_examples import Album, GroupView, Moves, StepView, answer_views, example_steps, view_moves
from vlmrl.report.token_colours import colour_legend
from vlmrl.rewards.boxes.planes import SPACES
from vlmrl.rewards.identity import identity_of
from vlmrl.services.calls import spent_in
from vlmrl.store import layout
from vlmrl.store.kept_recipe import newest_resolved, read_resolved, recipe_text
from vlmrl.store.layout import JUDGE_FILE, span
from vlmrl.store.media import RunImages
from vlmrl.store.runs import Run
from vlmrl.store.summary import describe
from vlmrl.store.verify import damage_of, shortened
from vlmrl.untrusted import number_of, plural

MAX_CAUSES = 3
BEGINNINGS = {
    "better": "It learned",
    "alike": "It learned to score more with one answer to nearly every prompt",
    "worse": "It became worse",
    "mixed": "It learned only in part",
    "no difference shown": "No change is shown",
    "not clear": "It is not clear whether it learned",
}
"""Answer of the paired comparison -> beginning of the sentence about it."""
COLOURS = {"better": "up", "worse": "down"}


@dataclass(frozen=True)
class Opening:
    """First sentences about a run.

    Args:
        learned: whether it learned, with the paired change of the validation and its interval.
        colour: `up` if it clearly learned, `down` if it became worse or made no update, else "".
        no_update: whether no step of a finished run updated the model.
        causes: what `runs diagnose` found, the most likely first; notes and consequences are left out.
        cost: time, GPUs, responses, sampled tokens, calls of a judge.
    """

    learned: str
    colour: str
    no_update: bool
    causes: Sequence[str]
    cost: str


def open_run_page(run: Run, about: Mapping[str, Any], lines: RunCurves, changes: Changes) -> Opening | None:
    """Return the opening, or None for a run that trains nothing.

    Args:
        about: facts of `describe`.
        changes: compares two validations.
    """
    if run.manifest.kind not in ("rl", "sft"):
        return None
    no_update = bool(lines.train) and not with_update(lines.train)
    causes, alike = _causes(run)
    if not lines.train:
        learned, colour = "No step has run: nothing was learned.", ""
    elif no_update:
        learned = f"Nothing was learned: none of the {len(lines.train):,} steps updated the model."
        colour = "down"
    else:
        learned, colour = _paired(lines, changes, alike)
    return Opening(learned, colour, no_update and about["status"] == "done", causes, _cost(run, about, lines))


def _paired(lines: RunCurves, changes: Changes, alike: bool) -> tuple[str, str]:
    """Return (sentence, colour) of the paired difference between the first and the last validation.

    Args:
        alike: whether the answers are nearly all alike, whatever the prompt: a higher score is no proof of learning.
    """
    names = (*LEADING, "loss", "metric")  # validations of several sources share only the last one
    ends = next((pair for name in names if (pair := validated_ends(lines, name)) is not None), None)
    if ends is None or "eval/loss" in ends[0]:
        return _by_loss(lines), ""
    first, last = ends
    if first["step"] == last["step"]:
        return "It is not known whether it learned: there is only one validation.", ""
    compared = changes(first["step"], last["step"])
    if not compared:
        return "It is not known whether it learned: the validations have no rows that can be paired.", ""
    comparisons: set[Comparison] = {comparison for _, comparison in compared.values()}
    answer = "alike" if alike and comparisons & {"better"} else overall(comparisons)
    numbers = ", ".join(f"{name} {signed({**d, 'difference': d['value']})}" for name, (d, _) in compared.items())
    counts = {name.rpartition(" ")[0]: int(d["n"]) for name, (d, _) in compared.items()}
    paired = number_of(sum(counts.values()), "response")
    text = f"{BEGINNINGS[answer]}: validation {numbers}, paired on {paired}, step {first['step']} to {last['step']}."
    return text, COLOURS.get(answer, "")


def _by_loss(lines: RunCurves) -> str:
    """Return how the validation loss changed. It has no paired interval: validation keeps only its mean."""
    ends = validated_ends(lines, "loss")
    if ends is None:
        return "It is not known whether it learned: there is no validation."
    (start, first), (end, last) = ((line["step"], float(line["eval/loss"])) for line in ends)
    if start == end:
        return f"It is not known whether it learned: there is only one validation, with loss {first:.3g}."
    change = "stayed at" if first == last else f"{'fell' if last < first else 'rose'} from {first:.3g} to"
    best, at = min((loss, n["step"]) for n in lines.validation if is_finite(loss := n.get("eval/loss")))
    if best < first and f"{best:.3g}" != f"{last:.3g}":
        change = f"fell from {first:.3g} to {best:.3g} at step {at}, its best, and then rose to"
    where = f"step {start} to {end}; there are no losses of single rows, so no paired interval"
    return f"The validation loss {change} {last:.3g}, {where}."


def _causes(run: Run) -> tuple[list[str], bool]:
    """Return the sentences of the causes that are no notes and follow from no other; whether answers are all alike."""
    try:
        causes = diagnose(run).causes
    except VlmrlError as error:
        return [f"not diagnosed: {error.message}"], False
    explained = {name for cause in causes for name in cause.follows}
    shown = [f"{c.level}: {c.what}" for c in causes if c.level != "note" and c.name not in explained]
    return shown[:MAX_CAUSES], any(c.name == "one_answer" for c in causes)


def _cost(run: Run, about: Mapping[str, Any], lines: RunCurves) -> str:
    """Return the time, GPU hours, responses, sampled tokens and judge calls, separated by commas."""
    gpus = len(run.manifest.hardware.get("gpus") or ())
    samples = [(int(n["rollout/samples"]), n) for n in lines.train if n.get("rollout/samples")]
    tokens = sum(count * float(n.get("rollout/response_tokens_mean") or 0.0) for count, n in samples)
    parts = [span(about["seconds"])]
    if gpus:
        parts.append(f"{about['seconds'] / 3600 * gpus:,.1f} GPU hours ({gpus} GPU{plural(gpus)})")
    if samples:
        parts.append(f"{sum(count for count, _ in samples):,} responses of {tokens:,.0f} tokens")
    try:
        spent = list(spent_in(run.dir / JUDGE_FILE).values())
    except VlmrlError as error:
        return ", ".join([*parts, error.message])
    if spent:
        calls, money = sum(s.calls for s in spent), sum(s.cost for s in spent)
        parts.append(f"{calls:,} calls of the judge" + (f" at {money:.4f}" if money else ""))
    return ", ".join(parts)


MAX_EVENTS = 40


@dataclass
class RunView:
    """Content of the page about one run."""

    label: str
    colour: int
    about: Mapping[str, Any]
    opening: Opening | None
    curves: curves.RunCurves
    headlines: Sequence[curves.Headline]
    facts: Sequence[tuple[str, str]]
    steps: Sequence[StepView]
    moves: Sequence[Moves]
    answers: Sequence[GroupView]
    answers_of: str
    recipe: Sequence[tuple[str, Any, str]]
    recipe_text: str
    events: Sequence[Mapping[str, Any]]
    provenance: Sequence[tuple[str, str]]
    notes: list[str] = field(default_factory=list)
    damage: Sequence[str] = ()


def write_report(runs: Sequence[Run], out: Path) -> dict[str, list[str]]:
    """Write the page, atomically. The folder of `out` is created.

    Returns: run id -> sentences about damaged files, for runs that have any.
    Raises: StoreError if the page cannot be written.
    """
    damage = {run.id: lines for run in runs if (lines := damage_of(run.dir))}
    write_page(out, render_report(runs, damage))
    return damage


def render_report(runs: Sequence[Run], damage: Mapping[str, list[str]] | None = None) -> str:
    """Return the page as text. Missing or damaged parts of a run are listed before its other content.

    Args:
        damage: run id -> sentences of `damage_of`; default: the runs are checked here.
    """
    album, labels = Album(), run_labels(runs)
    views = [view_run(run, label, colour, album) for colour, (run, label) in enumerate(zip(runs, labels, strict=True))]
    lines = [v.curves for v in views]
    reflection, reflection_words = curves.reflection_charts(lines)
    columns: list[EvalColumn] = []
    for run, view in zip(runs, views, strict=True):
        run_columns, problems = eval_columns(run, view.label, view.colour)
        columns += run_columns
        view.notes += problems
        view.damage = shortened(damage_of(run.dir) if damage is None else damage.get(run.id, []), run.id)
    groups = [group for view in views for group in (*view.answers, *(g for step in view.steps for g in step.groups))]
    return render(
        "template.html",
        title=" and ".join(labels) if len(labels) <= 3 else f"{len(labels)} runs",
        runs=views,
        charts=curves.main_charts(lines),
        parts=curves.part_charts(lines),
        validation=curves.validation_charts(lines),
        health=curves.health_charts(lines),
        reflection=reflection,
        reflection_words=reflection_words,
        epochs=view_epochs(runs),
        others=curves.other_charts(lines),
        evaluations=eval_tables(columns),
        step_notes=[note for run, view in zip(runs, views, strict=True) for note in step_notes(run, view.label)],
        differing=recipe_differences(views),
        colours=colour_legend(),
        samples=[sample for group in groups for sample in group.samples],
        legend=legend(group.truth for group in groups if any(sample.artifacts for sample in group.samples)),
        moves_word="Drawings" if any(m.drawn for view in views for m in view.moves) else "Boxes",
        shared=album.shared(),
        left_out=album.left_out,
    )


def run_labels(runs: Sequence[Run]) -> list[str]:
    """Return the labels of runs on the page: their names, or their ids if a name is missing or not unique."""
    names = [run.manifest.name or run.id for run in runs]
    return [name if names.count(name) == 1 else run.id for run, name in zip(runs, names, strict=True)]


def recipe_differences(views: Sequence[RunView]) -> list[tuple[str, list[Any]]]:
    """Return (key, value in each run) for recipe keys whose values differ; "-" if a run has no such key."""
    if len(views) < 2:
        return []
    recipes = [{key: value for key, value, _ in view.recipe} for view in views]
    keys = dict.fromkeys(key for recipe in recipes for key in recipe)
    rows = [(key, [recipe.get(key, "-") for recipe in recipes]) for key in keys]
    return [(key, values) for key, values in rows if any(v != values[0] for v in values)]


def view_run(run: Run, label: str, colour: int, album: Album) -> RunView:
    """Return the content of the page about a run, except its evaluations."""
    about, images = redact_value(describe(run)), run_images(run.dir)  # runs of earlier versions may hold secrets
    lines = curves.read_curves(run, label, colour)
    notes = [*about["problems"]]
    tools = {str(one.get("source")): one.get("environment") or {} for one in run.manifest.prompts}
    spaces = {source: one.get("args", {}).get("space") for source, one in tools.items()}
    album.spaces = {source: space for source, space in spaces.items() if space in SPACES}
    steps = example_steps(run, images, album)
    moves = view_moves(run, images, album, notes)
    answers, answers_of = _answers(run, images, album, notes) if not steps else ([], "")
    if not lines.train and not lines.validation and run.manifest.kind in ("rl", "sft"):
        notes.append("No metrics: the run ended before its first step, or metrics.jsonl is missing.")
    notes += [f"Images: {note}." for note in images.notes]
    recipe, recipe_text = _recipe(run, notes)
    facts = _facts(about, lines)
    facts += [("model", str(value)) for key, value, _ in recipe if key == "model.path"]
    facts += [("parent", about["parent_text"])] if run.manifest.forked_at is not None else []
    return RunView(
        label,
        colour,
        about,
        open_run_page(run, about, lines, partial(validation_changes, run)),
        lines,
        curves.headlines(lines),
        facts,
        steps,
        moves,
        answers,
        answers_of,
        recipe,
        recipe_text,
        lines.events[-MAX_EVENTS:],
        _provenance(run),
        notes,
    )


def _answers(run: Run, images: RunImages, album: Album, notes: list[str]) -> tuple[list[GroupView], str]:
    """Return (example answers, name) of the last evaluation, for a run without rollouts (`vlmrl sft`, evaluation)."""
    folders = layout.eval_dirs(run.dir)
    if not folders:
        return [], ""
    newest = max(folders, key=lambda f: (f / layout.EVAL_SUMMARY).stat().st_mtime)
    try:
        evaluation = read_evaluation(newest)
        images.add_resolvers([shown_pictures(evaluation, images)])
        return answer_views(evaluation.rows, images, album), newest.name
    except StoreError as error:
        notes.append(f"Evaluation {newest.name}: {error.message}.")
        return [], ""


def _facts(about: Mapping[str, Any], lines: curves.RunCurves) -> list[tuple[str, str]]:
    """Return the small numbers under the headline: length, speed, failures."""
    train = lines.train
    pairs: list[tuple[str, str]] = [("steps", f"{len(train):,}")] if train else []
    if about["datasets"]:
        pairs.append(("data", ", ".join(str(d.get("name") or d.get("path")) for d in about["datasets"])))
    for label, name, form in (
        ("dead groups", "rollout/dead_group_share", "{:.0%}"),
        ("truncated", "rollout/truncated_share", "{:.0%}"),
        ("tokens per second", "rollout/tokens_per_second", "{:,.0f}"),
        ("seconds per step", "time/step_seconds", "{:.1f}"),
    ):
        value = curves.mean_value(train, name)
        if value is not None:
            pairs.append((label, form.format(value)))
    for label, name in (
        ("failed rewards", "reward/errors"),
        ("unavailable rewards", "reward/unavailable"),
        ("responses that hung the reward", "reward/timeouts"),
    ):
        if count := sum(int(n.get(name) or 0) for n in train):
            pairs.append((label, f"{count:,}"))
    if best := about["best"]:
        pairs.append((f"best {best['metric']}", f"{number(best['value'])} at step {best['step']}"))
    if about["checkpoints"]:
        pairs.append(("checkpoints", f"{len(about['checkpoints'])}"))
    return pairs


def _recipe(run: Run, notes: list[str]) -> tuple[list[tuple[str, Any, str]], str]:
    """Return (key, value, origin) of every leaf of the resolved recipe, and the recipe's text as the user gave it."""
    from vlmrl.recipe.load import leaves
    from vlmrl.recipe.toml_lines import dotted

    text = redact_text(recipe_text(run.dir))
    if not newest_resolved(run.dir).exists():
        return [], text
    try:
        resolved = redact_value(read_resolved(run.dir))
    except StoreError as error:
        notes.append(f"The resolved recipe is damaged: {error.message}.")
        return [], text
    origins = resolved.get("origins", {})
    return [(dotted(k), v, str(origins.get(dotted(k), ""))) for k, v in leaves(resolved["recipe"])], text


def _provenance(run: Run) -> list[tuple[str, str]]:
    """Return (title, text) of the facts about how the run was made; unknown facts are left out."""
    m = run.manifest
    git, gpus = m.git or {}, m.hardware.get("gpus") or ()
    code = f"{str(git.get('commit', ''))[:12]}{' with uncommitted changes (code.diff)' if git.get('dirty') else ''}"
    pairs = [
        ("command", redact_text(shlex.join(m.argv))),
        ("run folder", str(run.dir)),
        ("parent", m.parent_text),
        ("code", code),
        ("vlmrl", f"{m.vlmrl}, Python {m.python}"),
        ("packages", ", ".join(f"{k} {v}" for k, v in m.packages.items())),
        ("hardware", ", ".join(str(v) for v in (m.hardware.get("cpu"), *(g.get("name") for g in gpus)) if v)),
        ("seeds", ", ".join(f"{k} {v}" for k, v in m.seeds.items())),
    ]
    for d in m.datasets:
        fingerprint = str(d.get("fingerprint") or "")[:16]
        pairs.append(
            (f"data {d.get('name', '')}", f"{d.get('path')}, {d.get('rows', '?')} rows, fingerprint {fingerprint}")
        )
    for r in m.rewards:
        pairs.append((f"reward {r.get('source', '')}", identity_of(r).words))
    for a in run.attempts:
        attempt_text = f"from step {a.from_step}, {a.start[:16].replace('T', ' ')} UTC on {a.host}: {a.status}"
        pairs += [(f"attempt {a.number}", attempt_text), (f"changed by attempt {a.number}", a.changes_text)]
    return [(k, v) for k, v in pairs if v.strip()]
