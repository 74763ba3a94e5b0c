"""Progress lines and counters on stderr, for training, evaluation and data preparation."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from vlmrl.cli.output import shorten
from vlmrl.types import Group
from vlmrl.untrusted import one_line, visible

MAX_TEXT = 400
"""Maximum number of characters of a response that is shown."""
MINUTE = 60.0


class ConsoleWatcher:
    """Progress of training: a line per step and validation, and some rollouts; on a terminal also a response counter.

    The lines are plain text, so that they are readable on a terminal and in a log file.
    """

    def __init__(self, stream: Any = None) -> None:
        self.stream = stream or sys.stderr
        self.live = self.stream.isatty()
        self.started = time.perf_counter()
        self.first_step: int | None = None
        self._counter = ""

    def message(self, text: str) -> None:
        self._line(text)

    def generated(self, done: int, total: int) -> None:
        if self.live:
            self._counter = f"  sampling {done}/{total}"
            self.stream.write("\r" + self._counter)
            self.stream.flush()

    def step(self, step: int, total: int, metrics: Mapping[str, Any]) -> None:
        from vlmrl.store.layout import span
        from vlmrl.store.metrics import counted

        if self.first_step is None:
            self.first_step, self.started = step, time.perf_counter() - metrics.get("time/step_seconds", 0.0)
        done = counted(step) - self.first_step
        left = (time.perf_counter() - self.started) / done * (total - counted(step))
        self._line(
            f"step {counted(step):>{len(str(total))}}/{total}  "
            + "  ".join(_step_parts(metrics))
            + f"  left {span(left)}"
            + (f"  ! {metrics['health/warning']}" if metrics.get("health/warning") else "")
        )

    def validation(self, step: int, summary: Mapping[str, Any], best: bool, metric: str) -> None:
        cells = by_setting(summary)
        shown = ("reward", "accuracy", "brier", "auc", "parse_failure", "loss", "perplexity")
        parts = (
            [] if cells else [f"{n} {_with_interval(summary, f'eval/{n}')}" for n in shown if f"eval/{n}" in summary]
        )
        value = summary.get("eval/metric", math.nan)
        if (cells or metric not in shown) and math.isfinite(value):
            parts.insert(0, f"{metric} {value:.3f}")
        self._line(f"validation at step {step}: " + "  ".join(parts) + ("  (best so far)" if best else ""))
        for cell, numbers in cells.items():
            self._line(f"  {cell}: " + "  ".join(numbers))

    def sample(self, step: int, group: Group) -> None:
        from vlmrl.redaction.redact import redact_text

        best = max(group.samples, key=lambda s: s.score.value if s.score.error is None else float("-inf"))
        text = shorten(best.text, MAX_TEXT + 4, mark=" ...")
        parts = "  ".join(f"{n} {'-' if v is None else f'{v:.2f}'}" for n, v in best.score.parts.items())
        self._line(f"  sample of {group.row.prompt_id}: {one_line(text)}")
        self._line(
            f"  score {best.score.value:.3f}: {parts}"
            + (f"  ({redact_text(best.score.note)})" if best.score.note else "")
        )

    def _line(self, text: str) -> None:
        from vlmrl.dist.world import print_line
        from vlmrl.redaction.redact import redact_said

        clear = "\r" + " " * len(self._counter) + "\r" if self.live and self._counter else ""
        self._counter = ""
        line = visible(redact_said(text))
        try:
            print_line(line, self.stream, clear)
        except RuntimeError:  # a signal came while another line was being written: a stream is not reentrant
            os.write(self.stream.fileno(), f"{clear}{line}\n".encode("utf-8", "backslashreplace"))


class PartCounter:
    """Counter of finished parts of a long computation (data/parallel_parts.py).

    On a terminal it is one line that is updated. Elsewhere it prints one line per minute, and one line when a stage
    with several parts ends.
    """

    def __init__(self, stream: Any = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream or sys.stderr, clock
        self._live = self._stream.isatty()
        self._what, self._done, self._first, self._begun, self._told = "", 0, 0, 0.0, 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        from vlmrl.store.layout import span

        now = self._clock()
        if what != self._what or done < self._done:
            self._what, self._first, self._begun, self._told = what, done, now, now
        self._done = done
        what = visible(what)
        line = f"{what}: {done:,} of {total:,} parts"
        if self._first < done < total:
            line += f", {span((now - self._begun) / (done - self._first) * (total - done))} left"
        if self._live:
            self._stream.write(f"\r\033[K{line}" + ("\n" if done == total else ""))
        elif done == total and total > 1:
            self._stream.write(f"{what}: {total:,} parts\n")
        elif done < total and now - self._told >= MINUTE:
            self._told = now
            self._stream.write(line + "\n")
        self._stream.flush()


def counter(what: str, stream: TextIO) -> Callable[[int, int], None]:
    """Return a function (done, total) that draws a counter on one line if `stream` is a terminal, and else nothing."""

    def draw(done: int, total: int) -> None:
        if stream.isatty():
            stream.write(f"\r  {what} {done}/{total}" + ("\n" if done == total else ""))
            stream.flush()

    return draw


REWARD_TROUBLES = (
    ("reward/errors", "reward errors {}"),
    ("reward/unavailable", "reward unavailable {}"),
    ("reward/outage_seconds", "waited {:.0f} s for a service"),
)
MORE_REWARD_TROUBLES = (("reward/timeouts", "reward timeouts {}"), ("reward/inapplicable", "not judged {}"))
UPDATE = (
    ("policy/entropy", "entropy {:.2f}"),
    ("loss/kl", "kl {:.3f}"),
    ("policy/kl_in_reward", "kl {:.3f}"),
    ("optim/grad_norm", "grad {:.2f}"),
)


def _step_parts(metrics: Mapping[str, Any]) -> list[str]:
    """Return the columns of a step's line: for reinforcement learning reward ..., for supervised learning loss."""
    from vlmrl.store.metrics import other_limits

    m = metrics
    parts: list[str] = []
    if "reward/mean" in m:
        ends = f" [{m['reward/low']:.3f}, {m['reward/high']:.3f}]" if "reward/low" in m else ""
        parts.append(f"reward {m['reward/mean']:.3f}{ends}")
        parts += [f"accuracy {m['reward/accuracy']:.3f}"] if "reward/accuracy" in m else []
        rewards = {n.rpartition("/")[2]: v for n, v in m.items() if n.startswith("reward/part/")}
        printed = {"accuracy"} if m.get("reward/accuracy") == rewards.get("accuracy") else set()
        printed |= set(rewards) if list(rewards.values()) == [m["reward/mean"]] else set()  # no number is printed twice
        parts += [f"{n} {v:.2f}" for n, v in rewards.items() if n not in printed]
        if "rollout/dead_group_share" in m:
            parts.append(f"dead {m['rollout/dead_group_share']:.0%}")
        parts.append(f"cut {m['rollout/truncated_share']:.0%}")
        parts += [f"{limit} {share:.0%}" for limit, share in other_limits(m).items()]
        if "episode/turns" in m:
            failed = f" ({share:.0%} failed)" if (share := m.get("episode/tool_errors")) else ""
            parts.append(f"turns {m['episode/turns']:.1f}  calls {m['episode/calls']:.1f}{failed}")
        parts.append(f"len {m['rollout/response_tokens_mean']:.0f}")
    if "loss/cross_entropy" in m:
        parts.append(f"loss {m['loss/cross_entropy']:.4f}")
    parts += [form.format(m[name]) for name, form in REWARD_TROUBLES if m.get(name)]
    if "judge/calls" in m:
        cost = f", cost {m['judge/cost']:.4f}" if "judge/cost" in m else ""
        parts.append(f"judge {m['judge/calls']:,} calls + {m['judge/cached'] + m['judge/shared']:,} known{cost}")
    parts += [form.format(m[name]) for name, form in MORE_REWARD_TROUBLES if m.get(name)]
    parts += [form.format(m[name]) for name, form in UPDATE if name in m]
    parts.append(f"{m['rollout/tokens_per_second']:,.0f} tok/s")
    parts.append(f"{m['memory/peak_bytes'] / 2**30:.1f} GiB")
    parts.append(f"{m['time/step_seconds']:.1f} s")
    return parts


def by_setting(summary: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return source, set and setting -> their numbers: accuracy, else reward, and pass@k, maj@k and mean@k.

    k is the largest one. Empty for a recipe with one source, without sets and settings.
    """
    cells: dict[str, dict[str, str]] = {}
    for name in summary:
        cell, _, metric = name.removeprefix("eval/").rpartition("/")
        if cell.rpartition("/")[2] == "part" or name.endswith(("_low", "_high")):
            continue
        if cell and metric.partition("@")[0] in ("accuracy", "reward", "pass", "maj", "mean"):
            kind = "accuracy" if metric == "reward" else metric.partition("@")[0]
            if kind != "accuracy" or metric == "accuracy" or "accuracy" not in cells.get(cell, {}):
                cells.setdefault(cell, {})[kind] = f"{metric} {_with_interval(summary, name)}"
    return {cell.replace("/", " "): list(numbers.values()) for cell, numbers in cells.items() if "accuracy" in numbers}


def _with_interval(summary: Mapping[str, Any], name: str) -> str:
    low, high = summary.get(f"{name}_low"), summary.get(f"{name}_high")
    value = f"{summary[name]:.3f}"
    return value if low is None or high is None else f"{value} [{low:.3f}, {high:.3f}]"
