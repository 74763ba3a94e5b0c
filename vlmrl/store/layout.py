"""Names of all files in a run folder, and formats of times. No other module spells these names out.

    <runs root>/<yyyymmdd-hhmmss>-<recipe>-<4 hex>/          time in UTC
      manifest.json  recipe.toml  resolved.json  code.diff  run.lock (only while a process writes)
      recipe-a2.toml, resolved-a2.json (of attempt 2, if it changed something)
      kept/reward-<16 hex>.py, task-<16 hex>.py, prompt-<16 hex>.jinja (by their hash)
      judge.sqlite (a judge's judgements, and what they have cost)
      metrics.jsonl  rollouts/000010.parquet, 000021-a2.parquet (by attempt 2), pruned.json
      demonstrations/000010.parquet (the demonstrations of a step, in the form of rollouts)
      sinks.json (records of its loggers); tensorboard/, wandb/ (files of loggers)
      eval/<name>/rows.parquet, summary.json, SHA256SUMS
      checkpoints/step-000010/ meta.json ... COMPLETE (last)
      logs/attempt-1/rank-0.log, logs/eval-<name>/rank-0.log          media/*.arrow          report.html
    <runs root>/unfinished/<name>-<16 hex>.jsonl              responses of an evaluation until it is finished
    <runs root>/checked/<source>/boxes-0.png                  of `check`: truth and a correct response over an image

Files and folders that begin with `.tmp-` are being written, those with `.trash-` are being deleted. Readers skip them.
"""

from __future__ import annotations

import os
import re
import secrets
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path

from vlmrl.errors import StoreError, shortened
from vlmrl.untrusted import RUN_PARTS, RUN_RECORD

LOGGER_FOLDERS = ("tensorboard", "wandb")
"""Folders of a run into which loggers write what they like (wandb links to its own logs); no reader opens them."""
MANIFEST = RUN_RECORD
ROLLOUTS, CHECKPOINTS, EVAL, RESOLVED, METRICS = RUN_PARTS
MERGE_RECORD = "merge.json"
"""File of a merged model with its source, and the result of its proof or the reason why there is none."""
RECIPE = "recipe.toml"
CODE_DIFF = "code.diff"
LOCK = "run.lock"
REPORT = "report.html"
EVAL_ROWS = "rows.parquet"
EVAL_MEDIA = "media.arrow"
"""File of an evaluation with images that rewards made, such as renders and overlays."""
EVAL_SUMMARY = "summary.json"
EVAL_HASHES = "SHA256SUMS"
"""File of an evaluation with the hashes of its other files; `sha256sum --check` reads it."""
META = "meta.json"
COMPLETE = "COMPLETE"
LOGS = "logs"
KEPT = "kept"
DEMONSTRATIONS = "demonstrations"
MEDIA = "media"
PACKED = "packed.json"
PRUNED = "pruned.json"
JUDGE_FILE = "judge.sqlite"
"""File of a judge's judgements and budget, in a run's folder; in the runs folder for what belongs to no run."""
SINKS = "sinks.json"
STEP_PREFIX = "step-"
UNFINISHED = "unfinished"
CHECKED = "checked"

MOST_NAME_BYTES = 180
"""Maximum length of a user's name, in bytes. File systems allow 255, and a source, `.tmp-` or a process id is added."""

MOST_WORD_BYTES = 64
"""Maximum length of each word of an evaluation's name, in bytes; see `eval_name`."""

RUN_ID = re.compile(r"\d{8}-\d{6}-[A-Za-z0-9._-]+-[0-9a-f]{4}")
RUNS_VARIABLE = "VLMRL_RUNS"
_KEPT_SUFFIX = {"task": ".py", "reward": ".py", "environment": ".py", "prompt": ".jinja"}
_ROLLOUT = re.compile(r"(step-)?(\d{6,})((?:-a(\d+))?)\.parquet")
_CHECKPOINT = re.compile(r"step-(\d{6,})")


def runs_root(option: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of the runs: the `--runs` option, else the environment variable VLMRL_RUNS, else `./runs`."""
    return Path(option or os.environ.get(RUNS_VARIABLE) or "runs")


def new_run_id(recipe_name: str, now: datetime | None = None) -> str:
    """Return `<yyyymmdd-hhmmss>-<recipe>-<4 hex>`, in UTC. Characters that a folder name cannot have become `-`."""
    slug = re.sub(r"[^A-Za-z0-9._]+", "-", recipe_name).strip("-._")[:40] or "run"
    return f"{(now or datetime.now(timezone.utc)):%Y%m%d-%H%M%S}-{slug}-{secrets.token_hex(2)}"


def recipe_path(run_dir: Path, attempt: int = 1) -> Path:
    """Return the path of the recipe as given to an attempt: `recipe.toml`, `recipe-a2.toml`."""
    return run_dir / (RECIPE if attempt == 1 else f"recipe-a{attempt}.toml")


def resolved_path(run_dir: Path, attempt: int = 1) -> Path:
    """Return the path of the recipe as resolved for an attempt: `resolved.json`, `resolved-a2.json`."""
    return run_dir / (RESOLVED if attempt == 1 else f"resolved-a{attempt}.json")


def kept_path(run_dir: Path, kind: str, sha256: str) -> Path:
    """Return `kept/reward-<16 hex>.py` or `kept/prompt-<16 hex>.jinja`. `sha256`: as in the manifest."""
    return run_dir / KEPT / f"{kind}-{re.sub('[^0-9a-f]', '', sha256)[:16]}{_KEPT_SUFFIX[kind]}"


def rollout_format(attempt: int = 1) -> str:
    """Return the format of an attempt's rollout files: `rollouts/{:06d}.parquet`, of a step counted from 1.

    Attempts after the first add `-a2`: nothing is ever overwritten. Earlier runs have `step-000010.parquet` instead.
    """
    return f"{ROLLOUTS}/{{:06d}}{_suffix(attempt)}.parquet"


def rollout_path(run_dir: Path, step: int, attempt: int = 1) -> Path:
    """Return `rollouts/000011.parquet` for the policy version 10, which samples in step 11 (`metrics.counted`)."""
    return run_dir / rollout_format(attempt).format(step + 1)


def media_path(run_dir: Path, step: int, attempt: int = 1) -> Path:
    """Return `media/000011.arrow`, the images that were made during a step (they are in no dataset row)."""
    return run_dir / MEDIA / rollout_path(run_dir, step, attempt).with_suffix(".arrow").name


def step_name(step: int) -> str:
    """Return the name of a policy version in file names: `step-000010`, made by step 10."""
    return f"{STEP_PREFIX}{step:06d}"


def parse_rollout_name(name: str) -> tuple[int, int] | None:
    """Return (policy version, attempt) of a rollout file's name, or None if `rollout_path` never made such a name."""
    match = _ROLLOUT.fullmatch(name)
    if match is None:
        return None
    number, attempt = int(match[2]), int(match[4] or 1)
    # Only the exact name is accepted: otherwise two files could belong to one step.
    exact = match[2] == f"{number:06d}" and match[3] == _suffix(attempt) and (match[1] or number)
    return (number if match[1] else number - 1, attempt) if exact else None


def _suffix(attempt: int) -> str:
    return "" if attempt == 1 else f"-a{attempt}"


def checkpoint_dir(run_dir: Path, step: int) -> Path:
    return run_dir / CHECKPOINTS / step_name(step)


def parse_checkpoint_name(name: str) -> int | None:
    """Return the step of a checkpoint folder's name, or None if `checkpoint_dir` cannot have made the name."""
    match = _CHECKPOINT.fullmatch(name)
    return int(match[1]) if match and checkpoint_dir(Path(), int(match[1])).name == name else None


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """Return the checkpoint folders with a file COMPLETE, oldest first. Readers ignore all other folders."""
    return [path for path in _checkpoint_folders(run_dir) if (path / COMPLETE).is_file()]


def incomplete_checkpoints(run_dir: Path) -> list[Path]:
    """Return checkpoint folders without COMPLETE, left by a kill. Only `verify` and the cleaning at resume use them."""
    return [path for path in _checkpoint_folders(run_dir) if not (path / COMPLETE).is_file()]


def _checkpoint_folders(run_dir: Path) -> list[Path]:
    try:
        entries = [Path(e.path) for e in os.scandir(run_dir / CHECKPOINTS) if e.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    steps_and_paths = [(step, path) for path in entries if (step := parse_checkpoint_name(path.name)) is not None]
    return [path for _, path in sorted(steps_and_paths)]


def merged_dirs(run_dir: Path) -> list[Path]:
    """Return models and adapters that `vlmrl merge` wrote into the run: `merged-step-000010`, `adapter-step-000010`."""
    return sorted(p for kind in ("merged", "adapter") for p in run_dir.glob(f"{kind}-step-*"))


def log_path(run_dir: Path, attempt: int, rank: int = 0) -> Path:
    return run_dir / LOGS / f"attempt-{attempt}" / f"rank-{rank}.log"


def eval_log_path(run_dir: Path, name: str, process: str) -> Path:
    """Return `logs/eval-<name>/<process>.log`, the log of a process of `vlmrl eval --gpus`."""
    return run_dir / LOGS / f"eval-{name}" / f"{process}.log"


def unfinished_path(root: Path, name: str, key: str) -> Path:
    """Return the file for the responses of unfinished work; `key`: 16 hex digits that identify the work."""
    return root / UNFINISHED / f"{eval_name(name)}-{key}.jsonl"


def unfinished_logs(root: Path, out: Path) -> Path:
    """Return the folder for the logs of the engines that generate the file `out`, until it is there."""
    return _of_out(root, out, "logs")


def unfinished_result(root: Path, out: Path) -> Path:
    """Return the file with the numbers of what ranks wrote to `out`, until their launcher reads it."""
    return _of_out(root, out, "written.json")


def _of_out(root: Path, out: Path, what: str) -> Path:
    key = sha256(str(out.resolve()).encode()).hexdigest()[:16]
    return root / UNFINISHED / f"{eval_name(out.name)}-{key}-{what}"


def eval_dir(run_dir: Path, name: str) -> Path:
    return run_dir / EVAL / name


def eval_name(*words: str) -> str:
    """Return the folder name of an evaluation: the words joined by `-`. Characters that are not allowed become `-`."""
    return "-".join(_short("".join(c if c.isalnum() or c in "._-" else "-" for c in word)) for word in words)


def _short(word: str) -> str:
    """Return a word of a name; a word that is too long is cut, and a hash of the whole word is added."""
    encoded = word.encode()
    if len(encoded) <= MOST_WORD_BYTES:
        return word
    return f"{encoded[: MOST_WORD_BYTES - 14].decode(errors='ignore')}-{sha256(encoded).hexdigest()[:12]}"


def check_eval_name(name: str | None) -> None:
    """Check a user's name for an evaluation; None = the user gave none. Raises: StoreError if it is not allowed."""
    if name is None:
        return
    if name.startswith(".") or any(c in name for c in "/\\\0") or not name.strip():
        raise StoreError(f"`{name}` cannot be the name of an evaluation", hint="use a plain name without slashes")
    if len(name.encode("utf-8", "replace")) > MOST_NAME_BYTES:
        raise StoreError(f"the name of an evaluation has at most {MOST_NAME_BYTES} bytes; `{shortened(name)}` has more")


def eval_dirs(run_dir: Path) -> list[Path]:
    """Return finished evaluations (those with summary.json), by name."""
    return [folder for folder in eval_folders(run_dir) if (folder / EVAL_SUMMARY).is_file()]


def eval_folders(run_dir: Path) -> list[Path]:
    """Return all evaluations by name, also without summary.json, except those that are being written or deleted."""
    folder = run_dir / EVAL
    folders = [p for p in folder.iterdir() if p.is_dir()] if folder.is_dir() else []
    return sorted(p for p in folders if not p.name.startswith((".tmp-", ".trash-")))


def now() -> str:
    """Return the current time as text: UTC, milliseconds, `2026-01-31T12:00:00.000+00:00`."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def parse(text: str | None) -> datetime | None:
    """Parse a time that `now` wrote as text. Return None if the text is not a time."""
    try:
        value = datetime.fromisoformat(text or "")
    except (TypeError, ValueError):
        return None
    return value if value.tzinfo else value.replace(tzinfo=timezone.utc)


def seconds_between(start: str | None, end: str | None = None) -> float | None:
    """Return the seconds from `start` to `end` (default: now), or None if a time is missing.

    The result is never below 0, even if the clock was set back.
    """
    begin, finish = parse(start), parse(end) if end else datetime.now(timezone.utc)
    return max(0.0, (finish - begin).total_seconds()) if begin and finish else None


def span(seconds: float | None) -> str:
    """Return a duration as text: `45 s`, `3 min 20 s`, `2 h 05 min`, `4 d 02 h`; `-` for None."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600:02d} h"


def ago(text: str | None) -> str:
    """Return the time since `text`, to the minute, as text: `45 s`, `12 min`, `3 h 05 min`; `-` if it is unknown."""
    seconds = seconds_between(text)
    duration = span(seconds)
    return duration.rpartition(" min ")[0] + " min" if duration.endswith(" s") and " min " in duration else duration
