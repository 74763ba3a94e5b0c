"""Output of `vlmrl eval`: table of metrics with notes on the rows below it, and the same facts for --json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmrl.cli.output import say, show_table, tell
from vlmrl.untrusted import plural

if TYPE_CHECKING:
    from vlmrl.evaluate.records import Evaluation

MEASURES_LEGEND = (
    "all responses: those that cannot be measured count as the worst value; ceiling: the truth beside itself; share: "
    "all responses / ceiling"
)


def show_evaluations(results: Sequence[dict[str, Any]], others: Sequence[Path | None]) -> None:
    """Print the metrics of evaluations. Notes that are the same for several are printed once, at the end.

    Args:
        others: for each one, folder of the evaluation that it is compared with.
    """
    legends: dict[str, None] = {}
    for result, other in zip(results, others, strict=True):
        legends |= dict.fromkeys(_show_evaluation(result, other))
    for legend in legends:
        tell(legend)


def _show_evaluation(result: dict[str, Any], other: Path | None) -> list[str]:
    """Print the metrics of one evaluation and what holds for it alone. Return the notes on how to read the table."""
    from vlmrl.evaluate.measured import measure_lines, measured_names
    from vlmrl.evaluate.metrics import task_problems
    from vlmrl.evaluate.over_epochs import published_here
    from vlmrl.evaluate.repeated import BEGINNINGS
    from vlmrl.store.evaluated_rows import role_label
    from vlmrl.tasks.reflection import PREFIX

    meta = result["meta"]
    numbers = published_here(meta.get("paper") or {}, meta)
    baselines, differences = result["baselines"], result.get("differences", {})
    headers = ["metric", "value", "95% interval", "n"]
    headers += ["blind baseline"] * bool(baselines) + ["paper"] * bool(numbers) + ["difference"] * bool(other)
    rows, left_out = [], _empty_group(result) | (measured_names(result) if measure_lines(result) else set())
    for name, m in result["metrics"].items():
        row = [name, number(m["value"]), interval(m), f"{m['n']:,}"]
        row += [number(baselines.get(name, {}).get("value"))] if baselines else []
        row += [str(numbers.get(name, "-"))] if numbers else []
        row += [difference(differences.get(name))] if other else []
        if name not in left_out:
            rows.append(row)
    show_table(_heading(result), headers, rows)
    show_measures(result)
    undefined = (result.get("set_metrics") or {}).get("undefined") or ()
    if _empty_group(result):
        tell(f"{PREFIX.rstrip('/')}: none in these answers")
    elif undefined:
        tell(f"not defined on these answers: {', '.join(undefined)}")
    if result["rows"] > result["prompts"] and not any(name.startswith(BEGINNINGS) for name in result["metrics"]):
        tell(
            "no pass@k, maj@k and mean@k: these rows have no accuracy (a part of the reward is one: [reward] accuracy)"
        )
    if other:
        tell(f"difference: this minus {other}, on the rows both have; * = its interval excludes 0")
        if not result.get("scored_alike", True):
            ours = ", nor is accuracy, which is one of the parts" if "accuracy_of" in result else ""
            tell(f"the two were scored by different rewards: `reward` and `part/...` are not comparable{ours}")
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
    return _legends(result, [name for name in result["metrics"] if name not in left_out], bool(numbers))


def _heading(result: Mapping[str, Any]) -> str:
    """Return model, rows and sampling. Example: im step-000020 on digits/test: 40 prompts, 80 images, greedy."""
    from vlmrl.store.evaluated_rows import images_of, sampling_words

    meta = result["meta"]
    of = meta["model"] if meta["checkpoint"] is None else f"{meta['model']} {meta['checkpoint']}"
    of += f" at {meta['endpoint']}" if meta.get("endpoint") else ""
    counts = [f"{result['prompts']:,} prompt{plural(result['prompts'])}"]
    counts += [f"{result['rows']:,} responses"] * (result["rows"] != result["prompts"])
    counts += [f"{result['images']:,} image{plural(result['images'])}"] * bool(result["images"])
    counts += [f"shown: {changed}"] if (changed := images_of(meta)) else []
    return f"{of} on {meta['source']}/{meta['split']}: {', '.join(counts)}, {sampling_words(meta)}"


def _empty_group(result: Mapping[str, Any]) -> set[str]:
    """Return the metrics of reflection if all of them are 0: one line says so."""
    from vlmrl.tasks.reflection import PREFIX

    names = {name for name in result["metrics"] if name.startswith(PREFIX)}
    return names if all(result["metrics"][name]["value"] == 0 for name in names) else set()


def _legends(result: Mapping[str, Any], names: Sequence[str], has_paper: bool) -> list[str]:
    """Return the notes on how to read the metrics `names` of a table."""
    from vlmrl.evaluate.interval import NO_INTERVAL
    from vlmrl.store.evaluated_rows import method_of, set_method_of

    metrics = {name: result["metrics"][name] for name in names}
    legends = []
    if result["rows"] != result["prompts"]:
        legends.append("n: responses; of pass@k, maj@k and mean@k prompts")
    dash = f"; - = none: {NO_INTERVAL}" if any(interval(m) == "-" for m in metrics.values()) else ""
    legends.append(f"intervals: {method_of(result)}{dash}")
    if (of_sets := set_method_of(result)) and metrics.keys() & set(result["set_metrics"]["names"]):
        legends.append(f"intervals {of_sets}")
    if has_paper:
        legends.append(f"paper: {result['meta']['paper'].get('source', 'no source named')}")
    if "accuracy_of" in result:
        legends.append(f"accuracy is {result['accuracy_of']}")
    return legends


def show_measures(result: Mapping[str, Any]) -> None:
    """Print the measures of a task side by side, and which ones are absent."""
    from vlmrl.evaluate.measured import absent_words, measure_lines

    lines = measure_lines(result)
    if lines:
        cells = [
            [
                x.name,
                *_cells(x.every),
                *_cells(x.valid),
                number(x.ceiling["value"] if x.ceiling else None),
                number(x.share),
            ]
            for x in lines
        ]
        show_table("", ["measure", "all responses", "n", "the valid ones", "n", "ceiling", "share"], cells)
        tell(MEASURES_LEGEND)
    for line in absent_words(result):
        tell(line)


def _cells(m: Mapping[str, Any] | None) -> list[str]:
    """Return a metric such as `0.812 [0.790, 0.831]`, and its number of responses."""
    return ["-", "-"] if m is None else [f"{number(m['value'])} {interval(dict(m))}", f"{m['n']:,}"]


def show_blind_probe(probe: dict[str, Any]) -> None:
    """Print how much of the metrics needs the images."""
    from vlmrl.evaluate.blind_probe import leading_metrics

    tell("")
    rows = []
    for name in leading_metrics(probe):
        m, share = probe["metrics"][name], probe["metrics"][name]["share"]
        part = "-" if share is None else f"{number(share['value'])} {interval(share)}"
        chance = number(m["chance"]["value"]) if m["chance"] else "-"
        needed = difference({"value": m["difference"], "low": m["low"], "high": m["high"]})
        rows.append([name, number(m["normal"]), number(m["changed"]), needed, part, chance])
    headers = ("metric", "with images", f"without ({probe['images']})", "needs the images", "share", "chance")
    show_table(f"Blind probe against {probe['normal']}", headers, rows)
    for text in probe["conclusion"]:
        tell(text)


def number(value: float | None) -> str:
    """Return a number with three decimals if it is below 10, else with one; a dash for None."""
    if value is None:
        return "-"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def interval(m: dict[str, Any]) -> str:
    """Return an interval such as `[0.676, 1.000]`; a dash if there is none."""
    return "-" if m["low"] is None or m["high"] is None else f"[{number(m['low'])}, {number(m['high'])}]"


def difference(m: dict[str, Any] | None) -> str:
    """Return a difference such as `+0.021 [+0.004, +0.037] *`. The star means that the interval excludes zero."""
    from vlmrl.evaluate.interval import excludes_zero

    if m is None:
        return "-"
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
