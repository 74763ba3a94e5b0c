"""Output of `vlmrl eval`: table of metrics with notes on the rows below it, and the same facts for --json."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmrl.cli.output import say, show_table, tell

if TYPE_CHECKING:
    from vlmrl.evaluate.records import Evaluation


def show_evaluation(result: dict[str, Any], other: Path | None) -> None:
    """Print the metrics of one evaluation. `other`: folder of the evaluation that it is compared with."""
    from vlmrl.evaluate.metrics import task_problems
    from vlmrl.evaluate.over_epochs import published_here
    from vlmrl.store.evaluated_rows import images_of, method_of, role_label, set_method_of

    meta, sampling = result["meta"], result["meta"]["sampling"]
    of = meta["model"] if meta["checkpoint"] is None else f"{meta['model']} {meta['checkpoint']}"
    of += f" at {meta['endpoint']}" if meta.get("endpoint") else ""
    how = "greedy" if sampling["greedy"] else f"T={sampling['temperature']:g}, {sampling['samples']} samples per prompt"
    numbers = published_here(meta.get("paper") or {}, meta)
    baselines, differences = result["baselines"], result.get("differences", {})
    headers = ["metric", "value", "95% interval", "rows"]
    headers += ["blind baseline"] * bool(baselines) + ["paper"] * bool(numbers) + ["difference"] * bool(other)
    rows = []
    for name, m in result["metrics"].items():
        row = [name, number(m["value"]), interval(m), f"{m['n']:,}"]
        row += [number(baselines.get(name, {}).get("value"))] if baselines else []
        row += [str(numbers.get(name, ""))] if numbers else []
        row += [difference(differences.get(name))] if other else []
        rows.append(row)
    images = f"{result['images']:,} images, " if result["images"] else ""
    images += f"shown: {changed}, " if (changed := images_of(meta)) else ""
    title = f"{of} on {meta['source']}/{meta['split']}: {result['prompts']:,} prompts, {images}{how}"
    show_table(title, headers, rows)
    tell(f"intervals: {method_of(result)}; - = none, because there is one cluster of rows")
    if of_sets := set_method_of(result):
        tell(f"intervals {of_sets}")
    if undefined := (result.get("set_metrics") or {}).get("undefined"):
        tell(f"not defined on these answers: {', '.join(undefined)}")
    if numbers:
        tell(f"paper: {meta['paper'].get('source', 'no source named')}")
    if other:
        tell(f"difference: this minus {other}, on the rows both have; * = its interval excludes 0")
        if not result.get("scored_alike", True):
            ours = ", nor is accuracy, which is one of the parts" if "accuracy_of" in result else ""
            tell(f"the two were scored by different rewards: `reward` and `part/...` are not comparable{ours}")
    if "accuracy_of" in result:
        tell(f"accuracy is {result['accuracy_of']}")
    if result["reward_errors"]:
        tell(f"the reward failed for {result['reward_errors']} of {result['rows']} answers: they are not in `reward`")
    if down := result.get("reward_unavailable"):
        tell(f"the reward was unavailable for {down} of {result['rows']} answers: they are not in `reward`")
    if refused := result.get("refused"):
        say(f"warning: the endpoint refused {refused['rows']} of {result['rows']} responses, which count as empty ones")
        say(f"the first: {refused['first']}")
    for problem in task_problems(result):
        say(f"warning: {problem}")
    if probe := result.get("blind_probe"):
        show_blind_probe(probe)
    label = role_label(meta)
    if label:
        tell(f"these are {label}")
    say(f"saved in {result['folder']}")


def show_blind_probe(probe: dict[str, Any]) -> None:
    """Print how much of the metrics needs the images."""
    from vlmrl.evaluate.blind_probe import leading_metrics

    tell("")
    rows = []
    for name in leading_metrics(probe):
        m, share = probe["metrics"][name], probe["metrics"][name]["share"]
        part = "-" if share is None else f"{number(share['value'])} {interval(share)}"
        chance = number(m["chance"]["value"]) if m["chance"] else ""
        needed = difference({"value": m["difference"], "low": m["low"], "high": m["high"]})
        rows.append([name, number(m["normal"]), number(m["changed"]), needed, part, chance])
    headers = ("metric", "with images", f"without ({probe['images']})", "needs the images", "share", "chance")
    show_table(f"Blind probe against {probe['normal']}", headers, rows)
    for text in probe["conclusion"]:
        tell(text)


def number(value: float | None) -> str:
    """Return a number with three decimals if it is below 10, else with one; "" for None."""
    if value is None:
        return ""
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def interval(m: dict[str, Any]) -> str:
    """Return an interval such as `[0.676, 1.000]`; a dash if there is none."""
    return "-" if m["low"] is None or m["high"] is None else f"[{number(m['low'])}, {number(m['high'])}]"


def difference(m: dict[str, Any] | None) -> str:
    """Return a difference such as `+0.021 [+0.004, +0.037] *`. The star means that the interval excludes zero."""
    from vlmrl.evaluate.interval import excludes_zero

    if m is None:
        return ""
    ends = "" if m["low"] is None else f" [{m['low']:+.3f}, {m['high']:+.3f}]"
    return f"{m['value']:+.3f}{ends}{' *' if excludes_zero(m['low'], m['high']) else ''}"


def result_fields(folder: Path, evaluation: Evaluation, other: Path | None) -> dict[str, Any]:
    """Return one evaluation for `--json`: its summary, its folder, and differences to another evaluation."""
    from vlmrl.evaluate.blind_probe import probe_of
    from vlmrl.evaluate.compare import differences
    from vlmrl.evaluate.records import read_evaluation
    from vlmrl.evaluate.scoring_rewards import scored_alike

    result = {"name": folder.name, "folder": str(folder), **evaluation.summary}
    if "set_metrics" in result:
        result["set_metrics"] = {name: value for name, value in result["set_metrics"].items() if name != "replicates"}
    if (probe := probe_of(folder, evaluation)) is not None:
        result["blind_probe"] = probe
    if other is not None:
        before = read_evaluation(other)
        metas = [e.summary.get("meta") or {} for e in (before, evaluation)]
        result["scored_alike"] = scored_alike(*metas) is not False
        result["differences"] = differences(evaluation, before)
    return result
