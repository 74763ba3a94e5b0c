"""Comparison of two runs or evaluations: is B better than A, how their inputs differ, how their results differ.

Every difference is B minus A, row by row on the rows that both evaluations answered, with its 95% interval (see
`evaluate/estimates.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise, product
from pathlib import Path
from typing import Any, Protocol, TypeVar

from vlmrl.errors import StoreError
from vlmrl.evaluate.blind_probe import family_of, label_of_both, probe_between, require_same_image_condition
from vlmrl.evaluate.estimates import METHOD, excludes_zero
from vlmrl.evaluate.metrics import task_problems
from vlmrl.evaluate.over_training import over_checkpoints, over_epochs, picked_by_hand, read_epochs
from vlmrl.evaluate.paired import (
    OTHER_REWARDS,
    PairedColumn,
    comparison,
    conclude,
    joined_by,
    joined_ranges,
    paired_columns,
    paired_differences,
    reward_words,
    scored_alike,
    scored_by,
    shared_rows,
)
from vlmrl.evaluate.records import Evaluation, read_evaluation
from vlmrl.evaluate.set_metrics import set_differences
from vlmrl.evaluate.significance import TEST_METHODS, correct_for_many, rows_needed_of, tests_of
from vlmrl.recipe.load import leaves, with_defaults
from vlmrl.recipe.toml_lines import dotted
from vlmrl.rewards.identity import changed_files, identity_of, single_records
from vlmrl.store import layout
from vlmrl.store.evaluated_rows import (
    ROLES,
    TRAINING_STEP,
    image_condition,
    listed_in_words,
    read_summary,
    refused_words,
    role_of,
    same_rows_key,
    set_method_of,
    without_step,
)
from vlmrl.store.kept_recipe import newest_resolved, read_resolved
from vlmrl.store.listing import reference
from vlmrl.store.manifest import short_value
from vlmrl.store.metrics import counted
from vlmrl.store.runs import Run, can_be_scored, eval_command, open_evaluation, open_run
from vlmrl.store.verify import damage_of, shortened
from vlmrl.tasks.prompt import same_prompt

_LEFT_OUT = ("step", "attempt")


@dataclass(frozen=True)
class Side:
    """One of the two things to compare.

    Args:
        run: the run; None for an evaluation folder outside of a run.
        evaluations: name -> folder. If one name has several steps, it is the one at the best (else the last) step.
        named: folders of evaluations that the user named.
    """

    ref: str
    run: Run | None
    evaluations: Mapping[str, Path] = field(default_factory=dict)
    named: Sequence[Path] = ()

    @property
    def title(self) -> str:
        return (self.run.manifest.name or self.run.id) if self.run else self.ref


@dataclass(frozen=True)
class SideEvaluation:
    """An evaluation of a side: its name there, and its summary ({} if that is damaged)."""

    name: str
    folder: Path
    run: Run | None
    title: str
    summary: Mapping[str, Any]

    @property
    def meta(self) -> Mapping[str, Any]:
        """Record of how it was made, from its summary."""
        return self.summary.get("meta") or {}

    @property
    def rows(self) -> str | None:
        """Key of its rows and sampling."""
        return same_rows_key(self.meta)


def open_side(root: Path, ref: str) -> Side:
    """Return a run (by any of its names), or one evaluation: RUN/NAME or its folder. Raises: StoreError for neither."""
    opened = open_evaluation(root, ref, trained=True)
    if isinstance(opened, Run):
        return Side(ref, opened, _evaluations(opened))
    run_dir = opened.resolve().parent.parent
    run = open_run(root, str(run_dir)) if (run_dir / layout.MANIFEST).is_file() else None
    return Side(ref, run, {"evaluation": opened}, (opened,))


def compare(a: Side, b: Side) -> dict[str, Any]:
    """Return all facts that `vlmrl compare` prints, as JSON values. Lists hold only differences, except metrics.

    Returns: "conclusion" (see `evaluate.paired.conclude`) first, then the facts that it is based on.
    """
    runs = [s.run for s in (a, b)]
    both = a.run is not None and b.run is not None
    lettered = [(letter, run) for letter, run in zip("AB", runs, strict=True) if run]
    notes = [f"{s.title}: {line}" for s in (a, b) if s.run for line in shortened(damage_of(s.run.dir), s.run.id)]
    notes += [note for s in (a, b) for folder in s.named for note in [picked_by_hand(folder, s.run)] if note]
    trained_alike = not (a.run and b.run) or same_rewards(a.run, b.run)
    evaluations, advice = [], ""
    common = common_evaluations([a, b], "AB")
    for name, (of_a, of_b) in common:
        assert of_a and of_b
        try:
            if not (a.named and b.named):
                require_same_image_condition(of_a.folder, of_b.folder)
            evaluations.append(_paired(name, of_a, of_b))
            for one in (of_a, of_b):
                if one.name not in (name, "evaluation"):
                    notes.append(f"{name}: the evaluation of {one.title} is {one.name}")
                notes += [f"{one.title}, {name}: {problem}" for problem in task_problems(one.summary)]
            if not one_reward(of_a, of_b):
                advice = advice or eval_like(b, of_a) or eval_like(a, of_b)
        except StoreError as error:
            notes.append(f"evaluation {name} is left out: {error.message}")
    if not common and (a.evaluations or b.evaluations):
        has = (listed_in_words(side.evaluations) for side in (a, b))
        notes.append("no evaluation in common: A has {}. B has {}".format(*has))
    incomparable = [e["name"] for e in evaluations if not e["scored_alike"]]
    if incomparable or not (trained_alike or evaluations):
        where = f" in {', '.join(incomparable)}" if incomparable and len(incomparable) < len(evaluations) else ""
        apart = any(e["accuracy_of_reward"] and not e["scored_alike"] for e in evaluations)
        addition = ", nor `accuracy`, which is a part of the reward" if apart else ""
        note = f"{OTHER_REWARDS} or weights{where}: `reward` and `part/...` are not comparable{addition}"
        rewards = (f"; A by {reward_a}; B by {reward_b}" for reward_a, reward_b in _scored_by(a, b, evaluations))
        notes.append(note + "".join(rewards))
    evaluations.sort(key=lambda e: (any(e["shown"]), ROLES.index(e["role"])))
    correct_for_many((family_of(e), m["metric"], m["test"]) for e in evaluations for m in e["metrics"] if m["test"])
    return {
        "conclusion": conclude(evaluations, advice or _how_to_evaluate(a, b)),
        "a": describe(a),
        "b": describe(b),
        "recipe": recipe_differences(a, b, notes) if both else [],
        "made_with": _provenance_differences(*(run for run in runs if run)) if both else [],
        "train": _lines(runs, "train") if both else [],
        "validation": _lines(runs, "validation") if both else [],
        "evaluations": evaluations,
        "epochs": over_epochs([(letter, [e]) for letter, run in lettered if (e := read_epochs(run))]),
        "checkpoints": [{"side": letter, **entry} for letter, run in lettered for entry in over_checkpoints(run)],
        "intervals": METHOD,
        "tests": TEST_METHODS,
        "notes": notes,
    }


def _how_to_evaluate(a: Side, b: Side) -> str:
    """Return the commands that evaluate both with the recipe of a run that has a reward: A's, else B's."""
    first, second = (a, b) if a.run and can_be_scored(a.run) else (b, a)
    if not (first.run and can_be_scored(first.run) and second.run and second.run.checkpoint_dirs()):
        return "evaluate both with one recipe that names a reward: vlmrl eval RUN --recipe RECIPE"
    of_second = eval_command(second.run, "--recipe", reference(first.run.dir, first.run.manifest.name))
    is_evaluated = first.evaluations and second.evaluations
    return f"make one: {of_second}" if is_evaluated else f"make them: {eval_command(first.run)}; {of_second}"


REPEATED = (
    *("--recipe", "--data", "--task", "--split", "--source", "--set"),
    *("--max-rows", "--sample", "--n", "--seed", "--settings"),
)
"""Options of `vlmrl eval` that say which rows are answered, how, and what scores them."""


def eval_like(side: Side, like: SideEvaluation) -> str:
    """Return the command that evaluates a run as `like` was, under a name that it has not; "" if none is known."""
    words = ["", *map(str, like.meta.get("argv") or ())]
    options = [w for before, w in pairwise(words) if before in REPEATED or w.partition("=")[0] in REPEATED]
    is_named = any(word.startswith(("--recipe", "--data")) for word in options)
    if not is_named and like.run and can_be_scored(like.run):
        options += ["--recipe", reference(like.run.dir, like.run.manifest.name)]
    if not (is_named or "--recipe" in options) or side.run is None or not side.run.checkpoint_dirs():
        return ""
    name = layout.eval_name(like.name, "as", like.title)
    free = next(one for i in count(1) if (one := name if i == 1 else f"{name}-{i}") not in side.evaluations)
    return eval_command(side.run, *options, "--name", free)


class Scored(Protocol):
    """An evaluation, and the run whose record says which reward scored it if the evaluation does not."""

    @property
    def run(self) -> Run | None: ...
    @property
    def meta(self) -> Mapping[str, Any]: ...


Of = TypeVar("Of", bound=Scored)


def one_reward(a: Scored, b: Scored) -> bool:
    """Return whether one reward scored two evaluations."""
    recorded = scored_alike(a.meta, b.meta)
    return (not (a.run and b.run) or same_rewards(a.run, b.run)) if recorded is None else recorded


def matched(candidates: Sequence[Sequence[Of]], settings: Sequence[str]) -> list[Of | None]:
    """Return the first evaluation of each side that one reward scored; None for a side without one.

    The reward is that of several settings, if there is one, then of the first setting, then of most sides.

    Args:
        settings: letter of the setting that each side belongs to.
    """
    each = [e for side in candidates for e in side]
    groups = [[next((c for c in side if one_reward(e, c)), None) for side in candidates] for e in each]
    return max(groups, key=lambda group: _rank(group, settings), default=[None for _ in candidates])


def _rank(group: Sequence[object], settings: Sequence[str]) -> tuple[bool, bool, int]:
    places = [place for place, one in zip(settings, group, strict=True) if one is not None]
    return len({*places}) > 1, settings[0] in places, len(places)


def common_evaluations(sides: Sequence[Side], settings: Sequence[str]) -> list[tuple[str, list[SideEvaluation | None]]]:
    """Return (name, evaluation of each side) of those of one name, then of others of the same rows and sampling.

    Those that one reward scored go together, under whatever name. A side that has none may have one of another reward.

    Args:
        settings: as of `matched`; at least two have an evaluation.
    """
    left = [[_evaluated(side, *item) for item in side.evaluations.items()] for side in sides]
    common: list[tuple[str, list[SideEvaluation | None]]] = []
    for alike, key in product((True, False), ("name", "rows")):
        for label in dict.fromkeys(getattr(e, key) for side in left for e in side):
            same = [[e for e in side if label and getattr(e, key) == label] for side in left]
            # Which of several that nothing tells apart is meant is not known.
            same = [[e for e in side if sum(one_reward(e, other) for other in side) == 1] for side in same]
            group = matched(same, settings)
            if alike and None in group and (key == "name" or not _rank(group, settings)[0]):
                continue
            group = [one or next(iter(side), None) for one, side in zip(group, same, strict=True)]
            if _rank(group, settings)[0]:
                common.append((label, group))
                left = [[e for e in side if e is not one] for side, one in zip(left, group, strict=True)]
    return common


def _evaluated(side: Side, name: str, folder: Path) -> SideEvaluation:
    try:
        summary = read_summary(folder)
    except StoreError:  # told where its rows are read
        summary = {}
    return SideEvaluation(name, folder, side.run, side.title, summary)


def _evaluations(run: Run) -> dict[str, Path]:
    """Return finished evaluations by name without the step: of several steps, the best one, else the last one."""
    folders: dict[str, Path] = {}
    best = run.manifest.best.step if run.manifest.best else None
    for folder in layout.eval_dirs(run.dir):
        name = without_step(folder.name)
        step_match = TRAINING_STEP.search(folders[name].name) if name in folders else None
        # Names sort by step, so a later folder replaces an earlier one, but never the best.
        if step_match is None or int(step_match[1]) != best:
            folders[name] = folder
    return folders


def describe(side: Side) -> dict[str, Any]:
    if side.run is None:
        return {"ref": side.ref, "run": None}
    m = side.run.manifest
    return {
        "ref": side.ref,
        "run": m.id,
        "name": m.name,
        "kind": m.kind,
        "recipe": m.recipe,
        "status": side.run.status,
        "labels": list(m.labels),
        "path": str(side.run.dir),
    }


def recipe_differences(a: Side, b: Side, notes: list[str]) -> list[dict[str, Any]]:
    values = []
    for side in (a, b):
        assert side.run is not None
        if not newest_resolved(side.run.dir).exists():
            notes.append(f"{side.title} has no resolved recipe: recipes are not compared")
            return []
        recipe = with_defaults(read_resolved(side.run.dir)["recipe"])
        values.append({dotted(key): value for key, value in leaves(recipe)} | _replaced_values(side.run))
    return _different(*values)


def _replaced_values(run: Run) -> dict[str, str]:
    """Return key -> all its values, for keys that resumes changed. Keys without an effect on training are left out.

    Example: optim.lr -> `0.001 to step 6, then 0.0005`
    """
    values: dict[str, str] = {}
    for attempt in run.manifest.attempts:
        for change in attempt.changes:
            if attempt.number > 1 and change.get("kind") != "free":  # those of the first are a fork's, from its parent
                before = values.get(key := str(change.get("what")), short_value(change.get("old")))
                values[key] = f"{before} to step {attempt.from_step}, then {short_value(change.get('new'))}"
    return values


def _provenance_differences(a: Run, b: Run) -> list[dict[str, Any]]:
    """Return the differences in how the two runs were made: code, packages, data, rewards, seeds, prompts."""
    rows = _different(_provenance(a), _provenance(b))
    prompts = [{str(p.get("source")): p for p in run.manifest.prompts} for run in (a, b)]
    for source in dict.fromkeys([*prompts[0], *prompts[1]]):
        one, other = (p.get(source) for p in prompts)
        if one is None or other is None or not same_prompt(one, other):
            marks = (None if p is None else str(p.get("sha256"))[:12] for p in (one, other))
            rows.append({"key": f"prompt {source}", "a": next(marks), "b": next(marks)})
    return rows


def _provenance(run: Run) -> dict[str, Any]:
    """Return the inputs of a run as a flat mapping: code, packages, data, reward, seeds, hardware."""
    m = run.manifest
    git = m.git or {}
    facts: dict[str, Any] = {
        "vlmrl": m.vlmrl,
        "vlmrl source": m.source_sha256[:12],
        "git commit": str(git.get("commit", ""))[:12] or None,
        "uncommitted changes": git.get("dirty"),
        "python": m.python,
        "threads": m.threads,
        "cpu": m.hardware.get("cpu"),
        "cpu cores": m.hardware.get("cpu_cores"),
        "gpus": ", ".join(str(g.get("name")) for g in m.hardware.get("gpus", ())) or "none",
        "parent": m.parent_text or None,
        "attempts": len(m.attempts),
    }
    diff = run.dir / layout.CODE_DIFF
    if diff.is_file():
        import hashlib

        facts["code.diff"] = hashlib.sha256(diff.read_bytes()).hexdigest()[:12]
    facts |= {f"package {name}": version for name, version in m.packages.items()}
    facts |= {f"seed {name}": value for name, value in m.seeds.items()}
    for entry in m.datasets:
        facts[f"data {entry.get('name')}"] = f"{str(entry.get('fingerprint'))[:12]} ({entry.get('rows', '?')} rows)"
    for entry in m.rewards:
        facts[f"reward {entry.get('source')}"] = reward_words(entry)
        for one in single_records(entry):
            modules = dict(one.get("files") or {})
            facts |= {f"reward's module {name}": str(sha256)[:12] for name, sha256 in modules.items()}
    return facts


def same_rewards(a: Run, b: Run) -> bool:
    """Return whether the same rewards, with the same weights, trained two runs."""
    ours, theirs = (
        [(entry.get("source"), identity_of(entry), entry.get("weights")) for entry in run.manifest.rewards]
        for run in (a, b)
    )
    return ours == theirs and not any(map(changed_files, a.manifest.rewards, b.manifest.rewards))


def _scored_by(a: Side, b: Side, evaluations: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the rewards of A and B in words, if they differ: those of the evaluations, else of the manifests."""
    pairs_of_words = [(e["scored_by"][0], e["scored_by"][1]) for e in evaluations if e["scored_by"]]
    if not pairs_of_words and a.run and b.run:
        records = zip(a.run.manifest.rewards, b.run.manifest.rewards, strict=False)
        pairs_of_words = [(reward_words(one), reward_words(other)) for one, other in records]
    return [pair for pair in dict.fromkeys(pairs_of_words) if pair[0] != pair[1]]


def _different(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "a": a.get(key), "b": b.get(key)} for key in {**a, **b} if a.get(key) != b.get(key)]


def _lines(runs: Sequence[Run | None], kind: str) -> list[dict[str, Any]]:
    """Return the last value of every metric of one kind; for validation, also that of the best step."""
    last: list[dict[str, Any]] = []
    best: list[dict[str, Any]] = []
    for run in runs:
        lines = run.metrics(kind) if run else []
        step = run.manifest.best.step if run and run.manifest.best else None
        last.append(lines[-1] if lines else {})
        best.append(next((n for n in lines if n["step"] == step), {}))
    at = [line.get("step") if kind == "validation" or not line else counted(line["step"]) for line in last]
    rows = [{"key": "step", "a": at[0], "b": at[1]}]
    if kind == "validation":
        rows[0] |= {"a_best": best[0].get("step"), "b_best": best[1].get("step")}
    for name in dict.fromkeys([*last[0], *last[1]]):
        values = [_number(x.get(name)) for x in (*last, *best)]
        if name in _LEFT_OUT or (values[0] is None and values[1] is None):
            continue
        row: dict[str, Any] = {"key": name, "a": values[0], "b": values[1]}
        rows.append(row | ({"a_best": values[2], "b_best": values[3]} if kind == "validation" else {}))
    return rows if len(rows) > 1 else []


def _paired(name: str, a: SideEvaluation, b: SideEvaluation) -> dict[str, Any]:
    """Return the differences on the rows that both evaluations answered."""
    left, right = read_evaluation(a.folder), read_evaluation(b.folder)
    pairs, changed = shared_rows(right.rows, left.rows)
    metas = [a.meta, b.meta]
    ways = [{**(meta.get("sampling") or {}), "endpoint": meta.get("endpoint")} for meta in metas]
    worst = max(metas, key=lambda meta: ROLES.index(role_of(meta)))
    alike = one_reward(a, b)
    of_reward = any("accuracy_of" in e.summary for e in (left, right))
    columns, differences_by_metric = differences(right, left)
    tests = tests_of(columns)
    comparisons = {m: comparison(m, d, alike, of_reward, tests.get(m)) for m, d in differences_by_metric.items()}
    columns = {name: column for name, column in columns.items() if comparisons[name] != "other reward"}
    tests = {name: test for name, test in tests.items() if name in columns}
    return {
        "name": name,
        "a": str(a.folder),
        "b": str(b.folder),
        "role": role_of(worst),
        "label": label_of_both(metas),
        "shown": [image_condition(meta) for meta in metas],
        "blind_probe": probe_between(left, right),
        "scored_alike": alike,
        "evaluated_with": [way for way in _different(*ways) if way["key"] != "greedy"],  # the temperature says it
        "one_text": [left.one_text, right.one_text],
        "refused": [refused_words(e.summary) for e in (left, right)],
        "accuracy_of_reward": of_reward,
        "intervals_of_sets": set_method_of(right.summary),
        "scored_by": [scored_by(meta) for meta in metas] if scored_alike(*metas) is False else None,
        "rows_a": len(left.rows),
        "rows_b": len(right.rows),
        "rows_paired": len(pairs),
        "rows_with_other_truth": changed,
        "power": rows_needed_of(columns),
        "metrics": [
            {
                "metric": metric,
                **{key: m[key] for key in ("a", "b")},
                "difference": m["value"],
                **{key: m[key] for key in ("low", "high", "n", "clusters", "range")},
                "verdict": comparisons[metric],
                "excludes_zero": excludes_zero(m["low"], m["high"]),
                "test": tests.get(metric),
            }
            for metric, m in differences_by_metric.items()
        ],
    }


def _number(value: Any) -> float | None:
    """Return a finite number unchanged; None for everything else."""
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def differences(after: Evaluation, before: Evaluation) -> tuple[dict[str, PairedColumn], dict[str, dict[str, Any]]]:
    """Return (metric -> its values on the rows that both have, metric -> after minus before, with its interval).

    The ranges and fields are those that both declare. Metrics of a whole split have a difference, but no values of
    rows. They are included if both evaluations have exactly the same rows.
    """
    summaries = (before.summary, after.summary)
    columns = paired_columns(after.rows, before.rows, joined_ranges(*summaries), joined_by(*summaries))
    differences_by_metric = paired_differences(columns) | set_differences(after.summary, before.summary)
    for name, difference in differences_by_metric.items():
        directions = {(summary["metrics"].get(name) or {}).get("better") for summary in summaries}
        difference["better"] = directions.pop() if len(directions) == 1 else None
    return columns, differences_by_metric
