"""Two runs or evaluations side by side: what was different going in, what came out, row by row where rows are shared.

Every difference is B minus A. Its 95% interval resamples the rows' images (see `evaluate.stats`), on the rows that both
evaluations answered.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlmrl.errors import StoreError
from vlmrl.evaluate.metrics import NOT_AVERAGED, clusters_of
from vlmrl.evaluate.records import read_evaluation
from vlmrl.evaluate.stats import paired_bootstrap
from vlmrl.recipe.lines import dotted
from vlmrl.recipe.load import leaves
from vlmrl.store import layout
from vlmrl.store.kept import newest_resolved
from vlmrl.store.runs import Run, open_run

Record = Mapping[str, Any]
_STEP = re.compile(r"-step-(\d{6,})(?=-|$)")
_LEFT_OUT = ("step", "attempt")
ABSENT = "-"


@dataclass(frozen=True)
class Side:
    """One of the two things compared.

    Args:
        ref: as the user named it.
        run: the run; None for an evaluation folder outside of one.
        evaluations: name -> folder. Of one name at several steps, the one at the best (else the last) step.
    """

    ref: str
    run: Run | None
    evaluations: Mapping[str, Path] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return (self.run.manifest.name or self.run.id) if self.run else self.ref


def open_side(root: Path, ref: str) -> Side:
    """A run (by any of its names), or the folder of one evaluation (`<run>/eval/<name>`).

    Raises: StoreError when it is neither.
    """
    folder = Path(ref)
    if (folder / layout.EVAL_SUMMARY).is_file():
        run_dir = folder.resolve().parent.parent
        run = open_run(root, str(run_dir)) if (run_dir / layout.MANIFEST).is_file() else None
        return Side(ref, run, {"evaluation": folder})
    run = open_run(root, ref, trained=True)
    return Side(ref, run, _evaluations(run))


def compare(a: Side, b: Side, *, seed: int = 0) -> dict[str, Any]:
    """Everything that `vlmrl compare` says, as JSON values. Lists hold differences only, except metrics.

    Args: seed: of the bootstrap.
    """
    runs = [s.run for s in (a, b)]
    both = a.run is not None and b.run is not None
    notes: list[str] = []
    result: dict[str, Any] = {
        "a": _describe(a),
        "b": _describe(b),
        "recipe": _recipe_differences(a, b, notes) if both else [],
        "made_with": _rows(*(_made_with(run) for run in runs if run), only_different=True) if both else [],
        "train": _lines(runs, "train") if both else [],
        "validation": _lines(runs, "validation") if both else [],
        "evaluations": [],
    }
    if a.run and b.run and _rewards(a.run) != _rewards(b.run):
        notes.append("A and B were scored by different rewards or weights: `reward` and `part/...` are not comparable")
    for name in [n for n in a.evaluations if n in b.evaluations]:
        try:
            result["evaluations"].append(_paired(name, a.evaluations[name], b.evaluations[name], seed))
        except StoreError as error:
            notes.append(f"evaluation {name} is left out: {error.message}")
    if not set(a.evaluations) & set(b.evaluations) and (a.evaluations or b.evaluations):
        names = (", ".join(s.evaluations) or "none" for s in (a, b))
        notes.append("no evaluation in common: A has {}; B has {}".format(*names))
    result["notes"] = notes
    return result


def _evaluations(run: Run) -> dict[str, Path]:
    """Finished evaluations by name without the step: of several steps the best's, else the last's."""
    found: dict[str, Path] = {}
    best = run.manifest.best.step if run.manifest.best else None
    for folder in layout.eval_dirs(run.dir):
        name = _STEP.sub("", folder.name)
        before = _STEP.search(found[name].name) if name in found else None
        # Names sort by step, so a later folder replaces an earlier one, but never the best.
        if before is None or int(before[1]) != best:
            found[name] = folder
    return found


def _describe(side: Side) -> dict[str, Any]:
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


def _recipe_differences(a: Side, b: Side, notes: list[str]) -> list[dict[str, Any]]:
    values = []
    for side in (a, b):
        assert side.run is not None
        path = newest_resolved(side.run.dir)
        try:
            values.append({dotted(key): value for key, value in leaves(json.loads(path.read_bytes())["recipe"])})
        except FileNotFoundError:
            notes.append(f"{side.title} has no resolved recipe: recipes are not compared")
            return []
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(f"the resolved recipe is damaged: {error}", where=str(path)) from error
    return _rows(values[0], values[1], only_different=True)


def _made_with(run: Run) -> dict[str, Any]:
    """What a run was made with, flat: code, packages, data, reward, prompt, seeds, hardware."""
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
        facts[f"reward {entry.get('source')}"] = f"{entry.get('name')} {str(entry.get('sha256'))[:12]}"
    for entry in m.prompts:
        facts[f"prompt {entry.get('source')}"] = str(entry.get("sha256"))[:12]
    return facts


def _rewards(run: Run) -> list[tuple[Any, ...]]:
    """What scored each source: name, code, weights."""
    keys = ("source", "name", "sha256", "weights", "args")
    return [tuple(json.dumps(entry.get(key), sort_keys=True) for key in keys) for entry in run.manifest.rewards]


def _rows(a: Mapping[str, Any], b: Mapping[str, Any], *, only_different: bool) -> list[dict[str, Any]]:
    keys = [*a, *(key for key in b if key not in a)]
    rows = [{"key": key, "a": a.get(key), "b": b.get(key)} for key in keys]
    return [r for r in rows if r["a"] != r["b"]] if only_different else rows


def _lines(runs: Sequence[Run | None], kind: str) -> list[dict[str, Any]]:
    """Last value of every metric of one kind, and for validation that of the best step too."""
    last: list[dict[str, Any]] = []
    best: list[dict[str, Any]] = []
    for run in runs:
        lines = run.metrics(kind) if run else []
        step = run.manifest.best.step if run and run.manifest.best else None
        last.append(lines[-1] if lines else {})
        best.append(next((n for n in lines if n["step"] == step), {}))
    rows = [{"key": "step", "a": last[0].get("step"), "b": last[1].get("step")}]
    if kind == "validation":
        rows[0] |= {"a_best": best[0].get("step"), "b_best": best[1].get("step")}
    for name in dict.fromkeys([*last[0], *last[1]]):
        values = [_number(x.get(name)) for x in (*last, *best)]
        if name in _LEFT_OUT or (values[0] is None and values[1] is None):
            continue
        row: dict[str, Any] = {"key": name, "a": values[0], "b": values[1]}
        rows.append(row | ({"a_best": values[2], "b_best": values[3]} if kind == "validation" else {}))
    return rows if len(rows) > 1 else []


def _paired(name: str, a: Path, b: Path, seed: int) -> dict[str, Any]:
    """Differences on the rows that both evaluations answered. Rows are the same when prompt, sample and truth are."""
    left, right = read_evaluation(a), read_evaluation(b)
    mine = {_key(r): r for r in left.rows}
    pairs = [(mine[_key(r)], r) for r in right.rows if _key(r) in mine]
    changed = sum(p["truth"] != q["truth"] for p, q in pairs)
    pairs = [(p, q) for p, q in pairs if p["truth"] == q["truth"]]
    result: dict[str, Any] = {
        "name": name,
        "a": str(a),
        "b": str(b),
        "rows_a": len(left.rows),
        "rows_b": len(right.rows),
        "rows_paired": len(pairs),
        "rows_with_other_truth": changed,
        "metrics": [],
    }
    for metric, pick in _metrics(pairs):
        chosen = [(p, q, pick(p), pick(q)) for p, q in pairs]
        both = [(p, x, y) for p, _, x, y in chosen if x is not None and y is not None]
        if not both:
            continue
        found = paired_bootstrap(
            [y for *_, y in both], [x for _, x, _ in both], clusters_of([p for p, *_ in both]), seed
        )
        mean_a, mean_b = math.fsum(x for _, x, _ in both) / len(both), math.fsum(y for *_, y in both) / len(both)
        result["metrics"].append(
            {
                "metric": metric,
                "a": mean_a,
                "b": mean_b,
                "difference": found.mean,
                "low": _number(found.low),
                "high": _number(found.high),
                "n": found.n,
                "excludes_zero": bool(found.low > 0 or found.high < 0),
            }
        )
    return result


def _metrics(pairs: Sequence[tuple[Record, Record]]) -> list[tuple[str, Callable[[Record], float | None]]]:
    """(name, value of a row) of what the rows have in common: reward, outcomes, parts, length."""
    outcomes = dict.fromkeys(k for p, _ in pairs for k in p["outcome"] if k not in NOT_AVERAGED)
    parts = dict.fromkeys(k for p, _ in pairs for k in p["parts"])
    found: list[tuple[str, Callable[[Record], float | None]]] = [("reward", lambda r: _number(r["score"]))]
    found += [(k, lambda r, k=k: _number(r["outcome"].get(k))) for k in outcomes]
    found += [(f"part/{k}", lambda r, k=k: _number(r["parts"].get(k))) for k in parts]
    return [*found, ("response_tokens", lambda r: _number(r["num_tokens"]))]


def _key(row: Record) -> tuple[str, int]:
    return str(row["prompt_id"]), int(row["sample"])


def _number(value: Any) -> float | None:
    """A finite number as it is; None for everything else."""
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None
