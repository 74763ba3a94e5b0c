"""`vlmrl reward-check` as one function: read responses, score them again, compare, attack. It does not import torch.

`--fail-on` has conditions: if one of them holds for the report, or cannot be measured, the command fails.

    CONDITIONS := CONDITION {"," CONDITION}        CONDITION := NAME [OP NUMBER]        OP := > | >= | < | <=

A name alone means `> 0`. `--out` writes the scores as a table: one row per response, in the order of the input.
"""

from __future__ import annotations

import io
import json
import math
import operator
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from vlmrl.errors import DataError, RewardError, StoreError, VlmrlError, did_you_mean
from vlmrl.redaction.redact import redact_said, redact_text, redact_value
from vlmrl.reward_check.rescore import diff_rewards, named_rewards, own_rewards, profile_rewards, scan_saved
from vlmrl.reward_check.responses import ResponseColumns
from vlmrl.reward_check.scores import Scores
from vlmrl.reward_check.scoring import ChosenReward, SavedResponses, SavedSample, ScoredResponses
from vlmrl.reward_check.statistics import (
    compare_stored,
    disagreements,
    extremes,
    fill_rows,
    group_table,
    part_table,
    reasons,
    row_of,
)
from vlmrl.reward_check.texts import correlations
from vlmrl.rewards import reward_record
from vlmrl.rewards.base import accuracy_part
from vlmrl.rewards.identity import identity_of
from vlmrl.store.files import write_atomic
from vlmrl.tasks.builtin_rewards import takes_any_truth
from vlmrl.tasks.truth_kinds import CONTRADICTS
from vlmrl.types import INAPPLICABLE
from vlmrl.untrusted import encodable

MOST_BROKEN = 10


@dataclass(frozen=True)
class RewardQuestion:
    """Options of a check.

    Args:
        reward: reward that replaces the run's own: a built-in, `file.py:function` or `profile:name`.
        diff: second reward, which is compared with the first; named in the same way.
        args, weights, style: arguments, weights and calling style of `diff` if it is given, else of `reward`, else
            changes to the run's own reward.
        probe: also attack the reward with known tricks.
        most: maximum number of rows per list in the report.
        jobs: number of processes for built-in rewards.
        keep_going: count unreadable rows and failures of a reward instead of stopping at the first.
    """

    reward: str | None = None
    diff: str | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    weights: Mapping[str, float] | None = None
    style: str = "auto"
    probe: bool = False
    most: int = 5
    jobs: int = 1
    keep_going: bool = False

    @property
    def is_lenient(self) -> bool:
        """Return whether every reward of the check accepts a ground truth of any form, unchanged."""
        return takes_any_truth(self.reward) and (self.diff is None or takes_any_truth(self.diff))


@dataclass
class Checked:
    """Report of a check as JSON values, with the data that it was computed from.

    Args:
        scores: the scores that the report describes.
        samples: row -> its texts, for the rows in the report.
        chosen: source -> the reward that computed `scores`; {} if these are the stored scores.
    """

    report: dict[str, Any]
    facts: ResponseColumns
    scores: Scores
    samples: Mapping[int, SavedSample]
    chosen: Mapping[str, ChosenReward] = field(default_factory=dict)


Sides = tuple["dict[str, ChosenReward] | None", "dict[str, ChosenReward] | None"]


def check_rewards(saved: SavedResponses, question: RewardQuestion) -> Checked:
    """Run the whole check and return its report.

    The report is a mapping with: path, run, steps, samples, groups, sources, notes, seconds;
        rewards: source -> name, weights, args and changes of the reward whose scores the report describes, and the part
        of this reward that measures accuracy;
        stored: comparison with the stored scores if the run's own reward was used unchanged (see `compare_stored`),
        else None;
        broken: number of rows that could not be read, and the first of them; errors: number of rows on which the reward
        failed, the first of them, and the number of rows without a score because a service was down;
        doubts: number of truths that were used unchanged although they break the task's form, and the number of them
        that contradict themselves;
        parts, reasons, dead_groups, disagreements: statistics of the scores (statistics.py);
        extremes: rows with the highest and the lowest scores, if the disagreements list no rows, else None;
        correlations: see `correlations`;
        diff: see `diff_rewards`, with the `names` of both rewards and the `errors` of the second; None if there is a
        single reward;
        probes: source -> result of `probe_reward` if requested, else None.

    Raises: RewardError for a reward that cannot be loaded or that fails on a row; DataError for rows that cannot be
        read; it names all of them.
    """
    start = time.perf_counter()
    own, own_error = _own(saved)
    first, second = _sides(saved, question, own, own_error)
    sides = [side for side in (first, second) if side is not None]
    result = scan_saved(saved, sides, jobs=question.jobs, keep_going=question.keep_going)
    _tell_doubts(saved, result)
    _tell_broken(saved, result, question.keep_going)
    saved.grouped = saved.grouped and len(np.unique(result.facts.groups_N)) < len(result.facts)
    scores = result.sides[0] if first is not None else result.stored
    assert scores is not None
    shown, shown_scores = first, scores
    diff = None
    if second is not None:
        other = result.sides[-1]
        diff = diff_rewards(saved, result.facts, scores, other, question.most)
        diff["names"] = {"first": _names(first) if first is not None else "as stored", "second": _names(second)}
        diff["errors"] = _errors(result.facts, other, question.most)
        if question.diff is None:
            shown, shown_scores = second, other
    is_own = first is not None and first is own
    apart = disagreements(result.facts, shown_scores, result.right_N, question.most)
    report = {
        **_about(saved, result.facts),
        "rewards": {
            source: _described(c, _accuracy_part(saved, source, c, result.facts, shown_scores))
            for source, c in (shown or {}).items()
        },
        "broken": {"number": result.num_broken, "first": [vars(b) for b in result.broken[:MOST_BROKEN]]},
        "doubts": {"number": result.num_doubts, "contradictions": result.num_contradictions},
        "errors": _errors(result.facts, shown_scores, question.most),
        "stored": compare_stored(result.facts, result.stored, scores, question.most)
        if is_own and result.stored
        else None,
        "parts": part_table(shown_scores),
        "reasons": reasons(shown_scores),
        "dead_groups": group_table(result.facts, shown_scores) if saved.grouped else None,
        "disagreements": apart,
        # Where reward and accuracy disagree, the rows on which they do tell more.
        "extremes": None
        if apart is not None and (apart["wrong"]["paid"] or apart["right"]["unpaid"])
        else extremes(result.facts, shown_scores, question.most),
        "correlations": correlations(result.facts, shown_scores, result.texts),
        "diff": diff,
    }
    samples = _fill(saved, report)
    report["probes"] = _probes(saved, result.facts, second or first or {}) if question.probe else None
    lines = ((source, probe["services"]) for source, probe in (report["probes"] or {}).items())
    report["notes"] += [f"tricks against {source}: {line}" for source, line in lines if line]
    report["seconds"] = round(time.perf_counter() - start, 3)
    return Checked(report, result.facts, shown_scores, samples, shown or {})


def _own(saved: SavedResponses) -> tuple[dict[str, ChosenReward] | None, VlmrlError | None]:
    """Return (own reward, None), or (None, error) if the own reward cannot be loaded.

    The own reward is that of the run or, for a table, that of the task that the user named.
    """
    try:
        if saved.run is None and saved.task is not None:
            return profile_rewards(saved, "default", args={}, weights=None), None
        return own_rewards(saved), None
    except VlmrlError as error:
        return None, error


def _sides(
    saved: SavedResponses, question: RewardQuestion, own: dict[str, ChosenReward] | None, own_error: VlmrlError | None
) -> Sides:
    """Return (first reward, second reward), each as source -> reward.

    If the first is None, the stored scores take its place. If the second is None, nothing is compared.
    """
    q = question
    if q.diff is not None:
        base = named_rewards(saved, q.reward, args={}, weights=None) if q.reward is not None else own
        if base is None and not saved.has_scores:
            raise own_error or RewardError("there is no reward to compare with")
        if base is None and own_error is not None:
            saved.notes.append(f"compared with the stored scores: {own_error.message}")
        return base, named_rewards(saved, q.diff, args=q.args, weights=q.weights, style=q.style)
    if q.reward is not None:
        requested = named_rewards(saved, q.reward, args=q.args, weights=q.weights, style=q.style)
        return (None, requested) if saved.has_scores else (requested, None)
    if own is None:
        raise own_error or RewardError("the run's reward cannot be loaded")
    changed = _changed(saved, own, q)
    if saved.run is None:
        return (None, changed or own) if saved.has_scores else (changed or own, None)
    return own, changed


def _changed(saved: SavedResponses, own: dict[str, ChosenReward], q: RewardQuestion) -> dict[str, ChosenReward] | None:
    """Return the run's own reward with the arguments or weights of the user; None if the user gave neither."""
    if q.args and saved.run is None:
        return profile_rewards(saved, "default", args=q.args, weights=q.weights)
    if q.args:
        if several := next((c.spec.name for c in own.values() if c.spec.members), None):
            hint = "name one of them: --reward NAME --set ...; or change the recipe"
            raise RewardError(
                f"--set changes the arguments of one reward, and the run has several: {several}", hint=hint
            )
        names = {source: str(saved.records[source]["name"]) for source in own}
        rewards_by_name = {
            name: named_rewards(saved, name, args=q.args, weights=q.weights) for name in set(names.values())
        }
        return {source: rewards_by_name[name][source] for source, name in names.items()}
    if q.weights is not None:
        return {source: replace(c, weights=q.weights) for source, c in own.items()}
    return None


def _tell_broken(saved: SavedResponses, result: ScoredResponses, keep_going: bool) -> None:
    """Raise an error that names the unreadable rows; with `keep_going`, note them instead."""
    if not result.num_broken:
        return
    lines = [f"\n    {b.where}: {b.why}" for b in result.broken[:MOST_BROKEN]]
    if result.num_broken > len(lines):
        lines.append(f"\n    ... and {result.num_broken - len(lines):,} more")
    message = f"{result.num_broken:,} of {result.num_broken + len(result.facts):,} rows cannot be read{''.join(lines)}"
    if not keep_going or not len(result.facts):
        hint = "repair them, or leave them out with --keep-going; nothing was written"
        raise DataError(message, where=str(saved.path), hint=hint)
    saved.notes.append(f"left out: {message}")


def _tell_doubts(saved: SavedResponses, result: ScoredResponses) -> None:
    """Add notes: how many truths were used unchanged although they contradict themselves or break the task's form."""
    kinds = {
        True: (
            "ground truth contradicts itself, and was scored as it is",
            "ground truths contradict themselves, and were scored as they are",
        ),
        False: ("ground truth is not in the task's form", "ground truths are not in the task's form"),
    }
    counts = {True: result.num_contradictions, False: result.num_doubts - result.num_contradictions}
    for contradicts, words in kinds.items():
        if counts[contradicts]:
            first = next((d for d in result.doubts if (CONTRADICTS in d.why) is contradicts), None)
            example = f"; {first.where}: {first.why}" if first else ""
            saved.notes.append(f"{counts[contradicts]:,} {words[counts[contradicts] > 1]}{example}")


def _errors(facts: ResponseColumns, scores: Scores, most: int) -> dict[str, Any]:
    failed = np.flatnonzero(scores.failed_N & ~scores.errors.is_word(INAPPLICABLE) & ~scores.unavailable_N)
    first = [row_of(facts, int(i), scores) for i in failed[:most]]
    down = np.flatnonzero(scores.unavailable_N)
    why = scores.errors[int(down[0])] if len(down) else None
    return {"number": len(failed), "first": first, "unavailable": len(down), "unavailable_why": why}


def _fill(saved: SavedResponses, report: Mapping[str, Any]) -> Mapping[int, SavedSample]:
    """Read the rows that the report lists, add their texts to the report, and return the rows."""
    places = [report["errors"]["first"], (report["stored"] or {}).get("worst", [])]
    places += [(report["disagreements"] or {}).get(k, []) for k in ("wrong_but_paid", "right_but_unpaid")]
    places += [(report["extremes"] or {}).get(k, []) for k in ("paid_most", "paid_least")]
    if diff := report["diff"]:
        places += [diff["changed"], diff["errors"]["first"]]
    rows = [row for place in places for row in place]
    samples = saved.pick(row["row"] for row in rows)
    fill_rows(rows, samples)
    return samples


def _probes(saved: SavedResponses, facts: ResponseColumns, chosen: Mapping[str, ChosenReward]) -> dict[str, Any]:
    from vlmrl.reward_check.probe import probe_source

    probes = {}
    for source, choice in chosen.items():
        probes[source] = probe_source(saved, facts, source, choice)
        for m in choice.spec.members:
            alone = probe_source(saved, facts, source, ChosenReward(m.spec, m.weights))
            # A reward that scores right and wrong answers alike, such as a length, is attacked within the sum only.
            if alone["is_read"]:
                probes[f"{source}: {m.label}"] = alone
    return probes


def _about(saved: SavedResponses, facts: ResponseColumns) -> dict[str, Any]:
    return {
        "path": str(saved.path),
        "run": saved.run.id if saved.run is not None else None,
        "steps": [int(facts.steps_N.min()), int(facts.steps_N.max())],
        "first_step": saved.first_step,
        "evaluations": list(saved.evaluations),
        "samples": len(facts),
        "groups": len(np.unique(facts.groups_N)) if saved.grouped else None,
        "sources": saved.sources,
        "notes": list(saved.notes),
    }


def _accuracy_part(
    saved: SavedResponses, source: str, choice: ChosenReward, facts: ResponseColumns, scores: Scores
) -> str | None:
    """Return the part of the reward that measures accuracy; None if there is no such part, or the task measures it."""
    ref = saved.task_ref(source)
    task = ref.make() if ref is not None and not choice.spec.accuracy_named else None
    try:
        if task is not None and "accuracy" in task.measured(saved.heads[source].truth):
            return None
    except RewardError:  # the task has its own accuracy, but cannot read this truth
        return None
    of_source_N = facts.sources.is_word(source)  # scores.parts has the parts of all sources
    parts = {name for name, column in scores.parts.items() if not np.isnan(column[of_source_N]).all()}
    return accuracy_part(parts, choice.spec)


def _described(choice: ChosenReward, accuracy: str | None) -> dict[str, Any]:
    return {
        "name": choice.spec.name,
        "version": choice.spec.version,
        "args": dict(choice.spec.args),
        "identity": identity_of(redact_value(reward_record(choice.spec, {}))).words,
        "weights": dict(choice.weights),
        "accuracy": accuracy,
        "changed": choice.changed,
    }


def _names(chosen: Mapping[str, ChosenReward]) -> str:
    return ", ".join(dict.fromkeys(c.spec.name for c in chosen.values()))


OPERATORS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
CONDITION = re.compile(r"\s*([a-z_0-9]+)(?:\(([^()\s]+)\))?\s*(?:(>=|<=|>|<)\s*([-+.\dA-Za-z]+)%?)?\s*")
Report = Mapping[str, Any]


@dataclass(frozen=True)
class Measure:
    """Number of a report that a condition can use.

    Args:
        words: description for the user.
        read: report -> the number, or None if it cannot be measured.
        of: kind of the name that is written in brackets, such as "PART"; "" = no brackets.
        needs: option that the number requires: "diff", "probe" or "" (none).
    """

    words: str
    read: Callable[..., float | None]
    of: str = ""
    needs: str = ""


def _probed(key: str) -> Callable[[Report], float | None]:
    """Return a function that adds a number of all probes; None = nothing was probed."""
    return lambda r: None if r["probes"] is None else float(sum(p[key] for p in r["probes"].values()))


def _slowest(report: Report) -> float | None:
    return max((p["behaviour"]["milliseconds"]["p99"] for p in (report["probes"] or {}).values()), default=None)


def _at(path: str) -> Callable[[Any], float | None]:
    """Return a function that reads the number at a path such as `diff.value` of a report; None if a table is None."""

    def read(report: Any) -> float | None:
        for key in path.split("."):
            report = None if report is None else report[key]
        return None if report is None else float(report)

    return read


def _correlation(report: Report, of: str) -> float | None:
    if of in ("length", "tokens", "step"):
        return _at("spearman")(report["correlations"][of])
    return _at("correlation")(_part(report, of))


def _part(report: Report, of: str) -> Mapping[str, Any]:
    if of not in report["parts"]:
        raise RewardError(
            f"--fail-on names the part `{of}`, which the reward does not have",
            hint=f"its parts: {', '.join(report['parts'])}",
        )
    return report["parts"][of]


MEASURES: dict[str, Measure] = {
    "errors": Measure("rows on which the reward failed; with --diff, the one that failed on more",
                      lambda r: max(float(one["errors"]["number"]) for one in (r, r["diff"] or r))),
    "broken": Measure("rows that could not be read", _at("broken.number")),
    "different": Measure("rows whose score is not the stored one", _at("stored.different")),
    "dead_groups": Measure("share of groups without a signal", _at("dead_groups.dead_share")),
    "mean": Measure("mean of a part, or of `value`", lambda r, of: _at("mean")(_part(r, of)), of="PART"),
    "corr": Measure("correlation of the score with `length`, `tokens`, `step` (by ranks) or a part", _correlation,
                    "NAME"),
    "ngrams": Measure("n-grams that became frequent and earn more",
                      lambda r: len(r["correlations"]["ngrams"]["found"])),
    "accuracy": Measure("the task's accuracy", _at("disagreements.accuracy")),
    "agreement": Measure("share of (right, wrong) pairs in the right order", _at("disagreements.agreement")),
    "changed": Measure("share of rows that the other reward changes", _at("diff.value.changed_share"), "", "diff"),
    "flipped": Measure("share of advantages whose sign changes", _at("diff.advantages.flipped_share"), "", "diff"),
    "rank": Measure("rank correlation of both rewards", _at("diff.value.rank_correlation"), "", "diff"),
    "probe": Measure("tricks that pay or break the reward", _probed("flagged"), "", "probe"),
    "warnings": Measure("honest spellings that lose, broken truths that are scored", _probed("warnings"), "", "probe"),
    "unsteady": Measure("1 = repeated calls differ, or rows depend on each other", _probed("unsteady"), "", "probe"),
    "p99_ms": Measure("slowest percent of calls, in milliseconds", _slowest, "", "probe"),
}  # fmt: skip


@dataclass(frozen=True)
class GateLimit:
    """One condition of --fail-on, such as `corr(length)>0.6`. `of` is the name in brackets, None if there is none."""

    name: str
    of: str | None
    op: str
    bound: float

    @property
    def measure(self) -> Measure:
        return MEASURES[self.name]

    @property
    def needs_errors(self) -> bool:
        """Return whether the check must count rows on which the reward fails, instead of ending at the first."""
        return self.name in ("errors", "broken")

    def __str__(self) -> str:
        return f"{self.name}{f'({self.of})' if self.of else ''} {self.op} {self.bound:g}"

    def value(self, report: Report) -> float | None:
        return self.measure.read(report, self.of) if self.of is not None else self.measure.read(report)

    def holds(self, report: Report) -> bool:
        """Return whether the condition holds, so that the command fails. Raises: RewardError for an unknown part."""
        value = self.value(report)
        return value is None or OPERATORS[self.op](value, self.bound)

    def told(self, report: Report) -> str:
        value = self.value(report)
        if value is None:
            return f"{self}: {self.measure.words}: cannot be measured here"
        return f"{self}: {self.measure.words}: {value:.4g}"


def parse_limits(text: str, *, diff: bool) -> list[GateLimit]:
    """Return the conditions of --fail-on.

    Args:
        diff: whether a second reward is compared (--diff).
    Raises: RewardError for a text that is not a condition, an unknown name, or a name that needs --diff if it is
        missing.
    Example: `probe,dead_groups>0.5,corr(length)>0.6` -> three limits.
    """
    return [_parse(item, diff) for item in text.split(",")]


def _parse(item: str, diff: bool) -> GateLimit:
    match = CONDITION.fullmatch(item)
    if match is None:
        raise RewardError(f"--fail-on {item.strip()!r} is not a condition", hint="write NAME, or NAME>0.5; " + known())
    name, of, op, number = match.groups()
    if name not in MEASURES:
        raise RewardError(f"--fail-on knows no `{name}`", hint=did_you_mean(name, MEASURES, known()))
    measure = MEASURES[name]
    if bool(of) != bool(measure.of):
        form = f"{name}({measure.of})" if measure.of else name
        raise RewardError(f"--fail-on {item.strip()!r}: `{name}` is written {form}")
    if measure.needs == "diff" and not diff:
        raise RewardError(f"--fail-on {name} compares two rewards", hint="add --diff REWARD")
    try:
        bound = float(number) if number is not None else 0.0
    except ValueError:
        bound = float("nan")
    if bound != bound or abs(bound) == float("inf"):
        raise RewardError(f"--fail-on {item.strip()!r}: {number!r} is not a number")
    if "%" in item:
        bound /= 100
    return GateLimit(name, of, op or ">", bound)


def known() -> str:
    return "known: " + ", ".join(f"{n}({m.of})" if m.of else n for n, m in MEASURES.items())


def needs_probe(limits: Sequence[GateLimit]) -> bool:
    return any(limit.measure.needs == "probe" for limit in limits)


SUFFIXES = (".parquet", ".jsonl", ".csv")
TAKEN = ("row", "score", "note")
PIECE_ROWS = 1 << 16


def check_out(path: Path) -> None:
    """Check that scores can be written to `path`, before the scoring begins. Raises: StoreError if they cannot."""
    if path.suffix.lower() not in SUFFIXES:
        raise StoreError(f"--out {path} has an unknown ending", hint=f"endings: {', '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise StoreError(f"--out {path}: there is no folder {path.parent}", hint="create it first")


def write_scores(path: Path, facts: ResponseColumns, scores: Scores) -> None:
    """Write the scores as a table, atomically.

    The columns are `row` (index in the input, from 0), `score`, one column per part, and `note`. If the reward failed
    on a row, the row's score and parts are empty and its note is `failed: ...`. If a part has the name of another
    column, its column is called `part_NAME`. Secrets in notes, errors and names of parts are hidden.

    Raises: StoreError if the file cannot be written.
    """
    writers = {".parquet": _parquet, ".jsonl": _jsonl, ".csv": _csv}
    write_atomic(path, writers[path.suffix.lower()](_table(facts, scores)))


def _table(facts: ResponseColumns, scores: Scores) -> Any:
    import pyarrow as pa

    said = (*scores.notes.words, *(f"failed: {error}" for error in scores.errors.words))
    words = [encodable(redact_text(w)) for w in said]
    codes = np.where(scores.failed_N, scores.errors.codes_N + len(scores.notes.words), scores.notes.codes_N)
    notes = pa.DictionaryArray.from_arrays(pa.array(np.maximum(codes, 0)), pa.array(words or [""], pa.string()))
    columns: dict[str, Any] = {"row": pa.array(facts.rows_N), "score": pa.array(scores.values_N, from_pandas=True)}
    for name, column in scores.parts.items():
        columns[encodable(redact_said(f"part_{name}" if name in TAKEN else name))] = pa.array(column, from_pandas=True)
    return pa.table({**columns, "note": notes})


def _parquet(table: Any) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    plain = table.set_column(table.num_columns - 1, "note", table["note"].cast(pa.string()))
    pq.write_table(plain, sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def _jsonl(table: Any) -> bytes:
    lines = (json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace") for row in _rows(table))
    return b"".join(line + b"\n" for line in lines)


def _csv(table: Any) -> bytes:
    import csv

    sink = io.StringIO(newline="")
    writer = csv.writer(sink)
    writer.writerow(table.column_names)
    writer.writerows(row.values() for row in _rows(table))
    return sink.getvalue().encode("utf-8", "backslashreplace")


def _rows(table: Any) -> Iterator[dict[str, Any]]:
    for batch in table.to_batches(PIECE_ROWS):
        yield from batch.to_pylist()


def finite(value: Any) -> Any:
    """Return a report as strict JSON values: NaN and infinities become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return value
