"""One run's evaluations of the same rows at several checkpoints: mean, maximum, and the checkpoint that was selected.

Checkpoints are selected by validation alone: `Manifest.best`, else the last one. The maximum over checkpoints on other
rows is shown with a label, because it is chosen on the rows that it is measured on: it is too high for new rows, by
several points for 100 rows and 30 checkpoints that are all equally good.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vlmrl.errors import StoreError
from vlmrl.evaluate.repeated import BEGINNINGS
from vlmrl.evaluate.tested import LEADING
from vlmrl.metric import metric_facts
from vlmrl.store import layout
from vlmrl.store.evaluated_rows import images_of, read_summary, role_of, without_step
from vlmrl.store.runs import Run

ON_TEST = "validated on the test split"
"""Label of a run whose checkpoints were selected on test rows, as the recipe allowed."""


def over_checkpoints(run: Run) -> list[dict[str, Any]]:
    """Return one entry per group of evaluations of the same rows, and per metric, if there are several steps.

    Returns: see `summary_over_steps`, with "evaluation": the name without the step. Damaged evaluations are left out,
        and those with changed images.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for folder in layout.eval_dirs(run.dir):
        try:
            summary = read_summary(folder)
        except StoreError:
            continue
        if step_of(summary) is not None and images_of(summary.get("meta") or {}) is None:
            groups.setdefault(without_step(folder.name), []).append(summary)
    entries = []
    for name, summaries in groups.items():
        for metric in _metrics(summaries):
            entry = summary_over_steps(summaries, metric, selected_step(run))
            if entry is None:
                continue
            if entry["selected"] and entry["selected"]["by"] == "validation" and ON_TEST in run.manifest.labels:
                entry["selected"]["by"] = ON_TEST
            entries.append({"evaluation": name, **entry})
    return entries


def _metrics(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the metrics that are summarised: accuracy, else reward, and pass@k, maj@k and mean@k."""
    names = list(dict.fromkeys(name for summary in summaries for name in summary["metrics"]))
    leading = [name for name in LEADING if name in names][:1]
    return leading + [name for name in names if name.startswith(BEGINNINGS)]


def selected_step(run: Run) -> int | None:
    """Return the step that validation selected; None if there was no validation."""
    return run.manifest.best.step if run.manifest.best else None


def step_of(summary: Mapping[str, Any]) -> int | None:
    """Return the step of the evaluated checkpoint."""
    step = (summary.get("meta") or {}).get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def summary_over_steps(
    summaries: Iterable[Mapping[str, Any]], metric: str, selected: int | None
) -> dict[str, Any] | None:
    """Return mean, best and selected value of a metric over checkpoints; None for fewer than two trained ones.

    The weights that a run starts from (step 0) may be the selected ones, but do not count for mean and best.

    Args:
        selected: step that validation selected; None = there was no validation, and the last step counts.
    Returns: {"metric", "role": of the rows, "steps", "values", "mean", "best": {"step", "value", "label"}, "selected":
        {"step", "value", "by": "validation" or "the last step"}, or None if that step was not evaluated}. "by" is
        ON_TEST in `over_checkpoints` if the run was validated on test rows.
    """
    values: dict[int, float] = {}
    roles: list[str] = []
    better = None
    for summary in summaries:
        step, entry = step_of(summary), summary["metrics"].get(metric)
        if step is not None and entry is not None and entry["value"] is not None:
            values[step] = float(entry["value"])
            roles.append(role_of(summary.get("meta") or {}))
            better = entry.get("better") or better
    steps = [step for step in sorted(values) if step > 0]
    if len(steps) < 2:
        return None
    lower = (better or metric_facts(metric).better) == "lower"
    best = (min if lower else max)(steps, key=lambda step: values[step])
    chosen, by = (steps[-1], "the last step") if selected is None else (selected, "validation")
    return {
        "metric": metric,
        "role": roles[-1],
        "steps": steps,
        "values": [values[step] for step in steps],
        "mean": sum(values[step] for step in steps) / len(steps),
        "best": {"step": best, "value": values[best], "label": best_label(len(steps), roles[-1])},
        "selected": {"step": chosen, "value": values[chosen], "by": by} if chosen in values else None,
    }


def best_label(num_steps: int, role: str) -> str:
    """Return the label of a maximum over checkpoints: which rows it was chosen on."""
    if role == "validation":
        return f"best of {num_steps} checkpoints, chosen on these validation rows"
    rows = {"test": "test rows", "training": "training rows"}.get(role, "rows")
    return f"best of {num_steps} checkpoints, chosen on these {rows} themselves: too good for new rows"


def words_of_steps(entry: Mapping[str, Any]) -> str:
    """Return an entry in words.

    Example: accuracy over 3 checkpoints: mean 0.610; 0.640 at step 200, which validation selected; 0.655 at step 300
        (best of 3 checkpoints, chosen on these test rows themselves: too good for new rows).
    """
    best, selected = entry["best"], entry["selected"]
    parts = [f"{entry['metric']} over {len(entry['steps'])} checkpoints: mean {entry['mean']:.3f}"]
    if selected is not None:
        by = selected["by"]
        which = {"validation": "which validation selected", ON_TEST: f"the best of a run {ON_TEST}"}.get(
            by, "the last one"
        )
        parts.append(f"{selected['value']:.3f} at step {selected['step']:,}, {which}")
    parts.append(f"{best['value']:.3f} at step {best['step']:,} ({best['label']})")
    return "; ".join(parts)


def picked_by_hand(folder: Path, run: Run | None) -> str:
    """Return a warning if an evaluation is one of several of the same rows, but not of the selected checkpoint; or "".

    Args:
        folder: the evaluation that the user named.
        run: its run; None outside of a run.
    """
    if run is None:
        return ""
    name, others = without_step(folder.name), _steps_by_name(layout.eval_dirs(run.dir))
    steps, own = others.get(name, {}), _steps_by_name([folder]).get(name, {})
    if len(steps) < 2 or not own:
        return ""
    (step, role), chosen = next(iter(own.items())), selected_step(run)
    if role == "validation" or step == (max(steps) if chosen is None else chosen):
        return ""
    rule = f"validation selected step {chosen:,}" if chosen is not None else f"the last one is step {max(steps):,}"
    return (
        f"{folder.name} is 1 of {len(steps)} checkpoints evaluated on these rows, and {rule}: "
        f"if step {step:,} was taken for its result here, that result is too good for new rows"
    )


def _steps_by_name(folders: Sequence[Path]) -> dict[str, dict[int, str]]:
    """Return evaluation without its step -> {step: role of its rows}."""
    steps: dict[str, dict[int, str]] = {}
    for folder in folders:
        try:
            summary = read_summary(folder)
        except StoreError:
            continue
        if (step := step_of(summary)) is not None:
            steps.setdefault(without_step(folder.name), {})[step] = role_of(summary.get("meta") or {})
    return steps
