"""Long responses on pages: the memory and time of store, report and reward-check for figures of 8,500 tokens.

    python scripts/bench/long_figures.py [--responses 512] [--tokens 8500] [--json] [--smoke]

Writes a run of one step with so many responses of SVG code, 3.5 characters a token, with the pictures that the reward
makes; each in groups of 8. Then reads it back, writes the report and the page of the reward, each in a process of its
own. Prints seconds, peak memory and the size of each file, per response and in sum.

`holds`: the pages have at most 16 MiB, `report` at most 1 GiB of memory and `reward-check`, which scores all responses
again, at most 2 GiB; and the code of a response stands whole on the page as text, never as an element. The exit code is
1 if it does not hold. With --smoke (few short responses) sizes are not judged.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

MIB = 1 << 20
MOST_PAGE, MOST_REPORT, MOST_CHECK = 16 * MIB, 1024 * MIB, 2048 * MIB
CHARS_PER_TOKEN = 3.5
GROUP = 8
MARK = "long-figure"


def figure(number: int, chars: int) -> str:
    """Return the code of a figure of about so many characters. Equal numbers have equal figures."""
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 480"><g id="{MARK}-{number}">']
    length, k = len(lines[0]), 0
    while length < chars - 20:
        x, y = (37 * (k + number)) % 500, (53 * k + 7 * number) % 400
        points = " ".join(f"{x + 3 * n % 97}.{n % 10},{y + 7 * n % 71}.{k % 10}" for n in range(120))
        lines.append(f'<polyline points="{points}" fill="none" stroke="#{(k * 40503) % 0xFFFFFF:06x}"/>')
        length, k = length + len(lines[-1]) + 1, k + 1
    return "\n".join([*lines, "</g></svg>"])


def write_run(root: Path, responses: int, chars: int) -> str:
    """Write the run. Returns its id."""
    from vlmrl.rewards import reward_record
    from vlmrl.rewards.scoring import Scorer
    from vlmrl.store.runs import create_run
    from vlmrl.tasks.builtin_rewards import load_reward
    from vlmrl.types import Group, RewardInput, Row, ScoredSample, Segment, Trajectory

    spec = load_reward("svg", args={"key": "svg", "pictures": True})
    run = create_run(root, kind="rl", recipe_name="long", rewards=[{"source": "figures", **reward_record(spec, {})}])
    group = min(GROUP, responses)
    with run, Scorer(spec, timeout_seconds=60) as scorer:
        groups = []
        for g in range(responses // group):
            truth = {"svg": figure(g, chars), "width": 640, "height": 480, "data_source": "drawn", "metadata": ""}
            row = Row(f"row-{g}", "figures", "figures", truth)
            texts = [figure(g + k, chars) for k in range(group)]
            inputs = [RewardInput(text, truth) for text in texts]
            samples = []
            for k, (text, score) in enumerate(zip(texts, scorer.score(inputs), strict=True)):
                assert score.error is None, score.error
                segment = Segment("assistant", tuple(range(int(chars / CHARS_PER_TOKEN))), True)
                t = Trajectory("figures", row.prompt_id, 0, k, 0, k, (1,), (segment,), (), "stop")
                samples.append(ScoredSample(t, text, score, advantage=score.value - 0.5))
            groups.append(Group(row, "Draw it.", tuple(samples)))
        start = time.perf_counter()
        run.write_rollouts(0, groups)
    print(json.dumps({"write_seconds": round(time.perf_counter() - start, 2)}))
    return run.id


def measured(words: list[str], folder: Path, here: bool) -> dict[str, Any]:
    """Do a part in a process of its own, or `here`. Returns its seconds, peak memory and last line."""
    start = time.perf_counter()
    if here:
        with chdir(folder), redirect_stdout(io.StringIO()) as sink:
            part(words)
        shown = sink.getvalue()
    else:
        command = [sys.executable, __file__, "--part", *words]
        shown = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, check=True, text=True).stdout
    return {"seconds": round(time.perf_counter() - start, 1), **json.loads(shown.splitlines()[-1])}


@contextmanager
def chdir(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    yield
    os.chdir(before)


def part(words: list[str]) -> None:
    """Do one part in this process, and print its peak memory in bytes."""
    import resource

    name, *rest = words
    extra: dict[str, Any] = {}
    if name == "write":
        extra["run"] = write_run(Path("runs"), int(rest[0]), int(rest[1]))
    elif name == "read":
        from vlmrl.store.runs import open_run

        extra["chars"] = sum(len(s.text) for g in open_run(Path("runs"), rest[0]).read_rollouts(0) for s in g.samples)
    else:
        from vlmrl.cli.app import app

        command = ["report", *rest] if name == "report" else ["reward-check", rest[0], "--html", rest[2]]
        app([*command, "--runs", "runs"], standalone_mode=False)
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(json.dumps({"peak": 1024 * peak, **extra}))


def whole_as_text(page: str) -> bool:
    """Return whether a page has the code of a response whole, and only as text."""
    import re

    texts = re.findall(r"<pre>(.*?)</pre>", page, re.DOTALL)
    code = [t for t in texts if f"&#34;{MARK}" in t]
    return bool(code) and all("&lt;/g&gt;&lt;/svg&gt;" in t for t in code) and f'<g id="{MARK}' not in page


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=8500)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--part", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        part(options.part)
        return 0
    responses, tokens = (4, 300) if options.smoke else (options.responses, options.tokens)
    here = options.smoke
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        results = {"write": measured(["write", str(responses), str(int(tokens * CHARS_PER_TOKEN))], folder, here)}
        run = results["write"].pop("run")
        results["read"] = measured(["read", run], folder, here)
        for name in ("report", "reward-check"):
            results[name] = measured([name, run, "--out", f"{name}.html"], folder, here)
            page = (folder / f"{name}.html").read_text()
            results[name] |= {"page": len(page.encode()), "whole": whole_as_text(page)}
        stored = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and file.suffix != ".html")
    pages = [results[name] for name in ("report", "reward-check")]
    small = all(page["page"] <= MOST_PAGE for page in pages)
    lean = pages[0]["peak"] <= MOST_REPORT and pages[1]["peak"] <= MOST_CHECK
    holds = all(page["whole"] for page in pages) and (options.smoke or (small and lean))
    print(json.dumps({"responses": responses, "tokens": tokens, "stored": stored, "holds": holds, **results}))
    if not options.json:
        for name, result in results.items():
            size = f", page {result['page'] / MIB:.1f} MiB" if "page" in result else ""
            print(f"{name}: {result['seconds']} s, peak {result['peak'] / MIB:,.0f} MiB{size}")
        print(f"holds: {str(holds).lower()}")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
