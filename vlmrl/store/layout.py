"""Every file name of a run folder. Nobody else writes these names.

    <runs root>/<yyyymmdd-hhmmss>-<recipe>-<4 hex>/          time in UTC
      manifest.json  recipe.toml  resolved.json  code.diff  run.lock (only while someone writes)
      recipe-a2.toml, resolved-a2.json (of attempt 2, when it changed something)
      kept/reward-<16 hex>.py, task-<16 hex>.py, prompt-<16 hex>.jinja (by their hash)
      metrics.jsonl  rollouts/step-000010.parquet, step-000021-a2.parquet (by attempt 2), pruned.json
      sinks.json (what its loggers want kept); tensorboard/, wandb/ (files of loggers)
      eval/<name>/rows.parquet, summary.json
      checkpoints/step-000010/ meta.json ... COMPLETE (last)
      logs/attempt-1/rank-0.log, logs/eval-<name>/rank-0.log          media/*.arrow          report.html
    <runs root>/queue-<group>/<run name>.log                  of `train --seeds`, `--grid`

Names that begin with `.tmp-` are being written, names that begin with `.trash-` are being deleted: no reader sees them.
"""

from __future__ import annotations

import os
import re
import secrets
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path

from vlmrl.errors import StoreError, shortened

MANIFEST = "manifest.json"
RECIPE = "recipe.toml"
RESOLVED = "resolved.json"
CODE_DIFF = "code.diff"
METRICS = "metrics.jsonl"
LOCK = "run.lock"
REPORT = "report.html"
ROLLOUTS = "rollouts"
EVAL = "eval"
EVAL_ROWS = "rows.parquet"
EVAL_MEDIA = "media.arrow"
"""Images that rewards made, such as renders and overlays."""
EVAL_SUMMARY = "summary.json"
CHECKPOINTS = "checkpoints"
META = "meta.json"
COMPLETE = "COMPLETE"
LOGS = "logs"
KEPT = "kept"
MEDIA = "media"
PACKED = "packed.json"
PRUNED = "pruned.json"
SINKS = "sinks.json"
STEP_PREFIX = "step-"

MOST_NAME_BYTES = 180
"""Of names that people give: a file system takes 255, and a name gets company (a source, `.tmp-`, a process id)."""

MOST_WORD_BYTES = 64
"""Of one of the words that a name is made of."""

RUN_ID = re.compile(r"\d{8}-\d{6}-[A-Za-z0-9._-]+-[0-9a-f]{4}")
RUNS_VARIABLE = "VLMRL_RUNS"
_KEPT_SUFFIX = {"task": ".py", "reward": ".py", "prompt": ".jinja"}
_ROLLOUT = re.compile(r"step-(\d{6,})(?:-a(\d+))?\.parquet")
_CHECKPOINT = re.compile(r"step-(\d{6,})")


def runs_root(option: str | os.PathLike[str] | None = None) -> Path:
    """Where runs live: the `--runs` option, else the environment variable VLMRL_RUNS, else `./runs`."""
    return Path(option or os.environ.get(RUNS_VARIABLE) or "runs")


def new_run_id(recipe_name: str, now: datetime | None = None) -> str:
    """`<yyyymmdd-hhmmss>-<recipe>-<4 hex>`, UTC; characters that do not belong into a folder name become `-`."""
    slug = re.sub(r"[^A-Za-z0-9._]+", "-", recipe_name).strip("-._")[:40] or "run"
    return f"{(now or datetime.now(timezone.utc)):%Y%m%d-%H%M%S}-{slug}-{secrets.token_hex(2)}"


def recipe_path(run_dir: Path, attempt: int = 1) -> Path:
    """The recipe as it was given to an attempt: `recipe.toml`, `recipe-a2.toml`."""
    return run_dir / (RECIPE if attempt == 1 else f"recipe-a{attempt}.toml")


def resolved_path(run_dir: Path, attempt: int = 1) -> Path:
    """The recipe as it was resolved for an attempt: `resolved.json`, `resolved-a2.json`."""
    return run_dir / (RESOLVED if attempt == 1 else f"resolved-a{attempt}.json")


def kept_path(run_dir: Path, kind: str, sha256: str) -> Path:
    """`kept/reward-<16 hex>.py`, `kept/prompt-<16 hex>.jinja`. `sha256`: as in the manifest."""
    return run_dir / KEPT / f"{kind}-{re.sub('[^0-9a-f]', '', sha256)[:16]}{_KEPT_SUFFIX[kind]}"


def rollout_path(run_dir: Path, step: int, attempt: int = 1) -> Path:
    """`rollouts/step-000010.parquet`; attempts after the first add `-a2`, so that nothing is ever overwritten."""
    suffix = "" if attempt == 1 else f"-a{attempt}"
    return run_dir / ROLLOUTS / f"{step_name(step)}{suffix}.parquet"


def media_path(run_dir: Path, step: int, attempt: int = 1) -> Path:
    """`media/step-000010.arrow`: images that a step made, beside those of its prompts."""
    return run_dir / MEDIA / rollout_path(run_dir, step, attempt).with_suffix(".arrow").name


def step_name(step: int) -> str:
    """How files call a policy version, and the steps that it sampled: `step-000010`."""
    return f"{STEP_PREFIX}{step:06d}"


def parse_rollout_name(name: str) -> tuple[int, int] | None:
    """(step, attempt) of a rollout file's name; None when it is not one, as `rollout_path` spells it."""
    match = _ROLLOUT.fullmatch(name)
    parsed = (int(match[1]), int(match[2] or 1)) if match else None
    # Two spellings of one step would be two files for it.
    return parsed if parsed and rollout_path(Path(), *parsed).name == name else None


def checkpoint_dir(run_dir: Path, step: int) -> Path:
    return run_dir / CHECKPOINTS / step_name(step)


def parse_checkpoint_name(name: str) -> int | None:
    """Step of a checkpoint folder's name; None when it is not one, as `checkpoint_dir` spells it."""
    match = _CHECKPOINT.fullmatch(name)
    return int(match[1]) if match and checkpoint_dir(Path(), int(match[1])).name == name else None


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoint folders that hold COMPLETE, oldest first. One without it does not exist for anyone."""
    return [path for path in _checkpoint_folders(run_dir) if (path / COMPLETE).is_file()]


def incomplete_checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoint folders without COMPLETE: what a kill left. For `verify` and for the sweep at resume only."""
    return [path for path in _checkpoint_folders(run_dir) if not (path / COMPLETE).is_file()]


def _checkpoint_folders(run_dir: Path) -> list[Path]:
    try:
        entries = [Path(e.path) for e in os.scandir(run_dir / CHECKPOINTS) if e.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [(step, path) for path in entries if (step := parse_checkpoint_name(path.name)) is not None]
    return [path for _, path in sorted(found)]


def merged_dirs(run_dir: Path) -> list[Path]:
    """Models and adapters that `vlmrl merge` wrote into the run: `merged-step-000010`, `adapter-step-000010`."""
    return sorted(p for kind in ("merged", "adapter") for p in run_dir.glob(f"{kind}-step-*"))


def log_path(run_dir: Path, attempt: int, rank: int = 0) -> Path:
    return run_dir / LOGS / f"attempt-{attempt}" / f"rank-{rank}.log"


def eval_log_path(run_dir: Path, name: str, process: str) -> Path:
    """`logs/eval-<name>/<process>.log`: of a process of `vlmrl eval --gpus`."""
    return run_dir / LOGS / f"eval-{name}" / f"{process}.log"


def queue_log(root: Path, group: str, name: str) -> Path:
    """Where a queue keeps what a run's command printed: beside the runs, in a folder that is no run."""
    return root / f"queue-{re.sub(r'[^A-Za-z0-9._-]+', '-', group)}" / f"{name}.log"


def eval_dir(run_dir: Path, name: str) -> Path:
    return run_dir / EVAL / name


def eval_name(*words: str) -> str:
    """The folder name of an evaluation: words joined by `-`, and `-` for what does not belong into a folder's name."""
    return "-".join(_short("".join(c if c.isalnum() or c in "._-" else "-" for c in word)) for word in words)


def _short(word: str) -> str:
    """A word of a name, cut with a hash of all of it where it is too long for one of several."""
    encoded = word.encode()
    if len(encoded) <= MOST_WORD_BYTES:
        return word
    return f"{encoded[: MOST_WORD_BYTES - 14].decode(errors='ignore')}-{sha256(encoded).hexdigest()[:12]}"


def check_eval_name(name: str | None) -> None:
    """Raise a StoreError when a name that a person gave cannot be that of an evaluation; None: none was given."""
    if name is None:
        return
    if name.startswith(".") or any(c in name for c in "/\\\0") or not name.strip():
        raise StoreError(f"`{name}` cannot be the name of an evaluation", hint="a plain name without slashes")
    if len(name.encode("utf-8", "replace")) > MOST_NAME_BYTES:
        raise StoreError(f"the name of an evaluation takes {MOST_NAME_BYTES} bytes; `{shortened(name)}` has more")


def eval_dirs(run_dir: Path) -> list[Path]:
    """Finished evaluations (they hold summary.json), by name."""
    return [folder for folder in eval_folders(run_dir) if (folder / EVAL_SUMMARY).is_file()]


def eval_folders(run_dir: Path) -> list[Path]:
    """Evaluations by name, also one that lost its summary; not what is being written or deleted."""
    folder = run_dir / EVAL
    found = [p for p in folder.iterdir() if p.is_dir()] if folder.is_dir() else []
    return sorted(p for p in found if not p.name.startswith((".tmp-", ".trash-")))
