"""The GPU day: everything of vlmrl that only a GPU can measure, in parts that run alone and end in time.

    scripts/gpu-day [--part NAME ...] [--call 1|2|3|4] [--minutes 9] [--out gpu-day.jsonl] [--smoke]
    scripts/gpu-day --bare DIR [PYTHON]     makes the environment of a lent machine and tries everything there

Each measurement runs in a process of its own under a time limit. Its lines are added to `--out`, and what it printed to
the log beside that file. A measurement that fails, hangs or lacks a library becomes a line that says so,
and the next one begins. Started again, the same command goes on with what is not in the file yet.

A line is a JSON object: `part`, `measure`, `case`, `outcome` ("done", or why there are no figures), `ok` (true or false
where the part has a criterion, else null), `note`, `device`, `torch`, `transformers`, `smoke`, `attempt`, and figures.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from vlmrl.process import adopt_orphans, descendants, die_with_parent, end_on_sigterm, kill_all

CALL_MINUTES = 9.0
"""Longest time of one call of this script."""
LOG_CHARACTERS = 20_000
"""How much of what a measurement printed is kept in the log."""
CACHE = "TORCHINDUCTOR_CACHE_DIR"
TICK_SECONDS = 0.1
HOW_TO_CARRY = """\
fetch their wheels for the machine's Python, say 3.12, into a folder for --wheels (scripts/gpu-day --bare DIR does it):
  scripts/gpu-day --carry > carry.txt
  pip download --no-deps --only-binary :all: --python-version 3.12 -r carry.txt -d wheels"""
CARRIED_BYTES, PROJECT_BYTES = 64 << 20, 18 << 20
"""Limit of what may be carried to a lent machine, and the part of it that this project's files take."""
USUALLY_THERE = ("accelerate", "peft", "pillow", "pyarrow", "scipy")
"""Packages beside torch, torchvision and transformers that GPU images have; their wheels are the large ones."""
NO_GPU_HINT = "`nvidia-smi` shows the driver; --smoke runs toy sizes on the CPU"
CORE = ("torch", "transformers")
ADAPTERS = (*CORE, "peft")
SHARDING = (*CORE, "pydantic")
COMMANDS = (
    *ADAPTERS,
    "pydantic",
    "typer",
    "rich",
    "jinja2",
    "pyarrow",
    "PIL",
    "scipy",
    "yaml",
    "detect_secrets",
    "httpx",
)
"""Modules that each kind of measurement imports."""

Row = dict[str, Any]
"""The figures of one case: `case`, and optionally `ok` and `note`."""


@dataclass(frozen=True)
class Measure:
    """One measurement: a function of a module beside this file.

    Args:
        name: unique within its part.      target: "module:function"; it is called as `function(smoke, **args)` and
            yields `Row`s.
        limit_seconds: of its process, the start of Python included.      needs: modules that it imports.
        times_compiling: whether it times compilation. Its Inductor cache is empty and its own then; all others share
            one, so that nothing is compiled twice in a day.
    """

    name: str
    target: str
    limit_seconds: int
    needs: tuple[str, ...] = CORE
    args: Mapping[str, Any] = field(default_factory=dict)
    times_compiling: bool = False


@dataclass(frozen=True)
class Part:
    """Some measurements whose results are one table.

    Args:
        about: what the part measures, in one line.      call: in which of the four calls it runs.
        criterion: when a case is ok, in words; "" = the part has none.
        columns: heading -> (key of the row, format) of its table.
    """

    about: str
    call: int
    measures: tuple[Measure, ...]
    columns: Mapping[str, tuple[str, str]]
    criterion: str = ""


def _cases(patterns: Sequence[str], limit_seconds: int, needs: tuple[str, ...] = CORE) -> tuple[Measure, ...]:
    """Cases of `gpu.py` by the patterns of their names."""
    return tuple(Measure(p, "gpu:measure_cases", limit_seconds, needs, {"pattern": p}) for p in patterns)


PATHS = ("shared-varlen", "packed-varlen", "padded-sdpa")
LARGE = "taxon/Qwen2.5-VL-7B"
SMALL = "taxon/Qwen2.5-VL-3B/adamw/shared-varlen"
PARTS: dict[str, Part] = {
    "kernels": Part(
        "attention kernels beside a float32 oracle: packed rows and vision towers, by heads and head width",
        1,
        (
            Measure("varlen", "gpu_kernels:varlen_rows", 45),
            Measure("vision", "gpu_kernels:vision_towers", 30),
            Measure("flex", "gpu_kernels:flex_rows", 100, times_compiling=True),
        ),
        {
            "output": ("error_out", ".1e"),
            "dq": ("error_dq", ".1e"),
            "dk": ("error_dk", ".1e"),
            "dv": ("error_dv", ".1e"),
            "SDPA's worst": ("error_stock", ".1e"),
            "first call, s": ("compile_seconds", ".1f"),
        },
        "each error (norm of the difference over the norm) is at most 1.2 times the largest of SDPA's in bfloat16",
    ),
    "speed": Part(
        "one layer's attention, forward and backward, over a row; the graphs that FlexAttention compiles",
        1,
        (
            Measure("layer", "gpu_kernels:layer_speed", 45),
            Measure("graphs", "gpu_kernels:flex_graphs", 100, times_compiling=True),
        ),
        {
            "ms": ("milliseconds", ".2f"),
            "TFLOP/s": ("tflops", ".0f"),
            "rows": ("rows", ""),
            "row lengths": ("buckets", ""),
            "graphs": ("graphs", ""),
            "s a graph": ("seconds_a_graph", ".1f"),
        },
        "ten rows compile no more graphs than they have padded lengths",
    ),
    "updates": Part(
        "an update of the TaxonRL shape (two 800-pixel images, 16 responses of 300 tokens), and of 16,384 text tokens",
        2,
        (
            *_cases([f"taxon/Qwen2.5-VL-3B/adamw/{path}" for path in PATHS], 50),
            *(
                Measure(
                    f"{LARGE}/{path}",
                    "gpu:measure_first_that_fits",
                    60,
                    (*ADAPTERS, "pydantic"),
                    {"patterns": [f"{LARGE}/{trained}/{path}" for trained in ("adamw_bf16_kahan", "LoRA64")]},
                )
                for path in PATHS
            ),
            *_cases(["text/Qwen3-VL-4B/LoRA16/shared-varlen"], 45, ADAPTERS),
        ),
        {
            "s an update": ("seconds", ".2f"),
            "response tokens/s": ("response_tokens_per_s", ",.0f"),
            "tokens computed": ("computed_tokens", ","),
            "tokens computed/s": ("computed_tokens_per_s", ",.0f"),
            "MFU as prime-rl counts": ("mfu_prime_rl", ".1%"),
            "MFU of the work done": ("mfu_done", ".1%"),
            "MFU of the padded equivalent": ("mfu_worth", ".1%"),
            "peak GiB": ("peak_gib", ".1f"),
        },
    ),
    "compiled": Part(
        "the 3B model's update without recomputation: compiled layers, other kernels, what counted operations predict",
        4,
        (
            *_cases([f"{SMALL}/recompute-False{way}" for way in ("", "/compiled", "/fa3", "/fa4")], 70),
            *_cases([f"parity-{SMALL}/compiled"], 75),
            Measure("roofline", "update_roofline:beside_measured", 120, ADAPTERS),
        ),
        {
            "s an update": ("seconds", ".2f"),
            "MFU of the work done": ("mfu_done", ".1%"),
            "peak GiB": ("peak_gib", ".1f"),
            "log-prob mean": ("ours_logp_mean", ".1e"),
            "stock mean": ("stock_logp_mean", ".1e"),
            "gradient": ("ours_gradient", ".1e"),
            "stock gradient": ("stock_gradient", ".1e"),
            "predicted, s": ("predicted_s", ".2f"),
            "predicted / measured": ("ratio", ".2f"),
            "products, TFLOP/s": ("products_rate", ".0f"),
            "attention, TFLOP/s": ("attention_rate", ".0f"),
            "memory, TB/s": ("memory_rate", ".2f"),
        },
        "compiled: mean log-prob error and gradient error are at most 1.2 times the stock model's",
    ),
    "parity": Part(
        "log-probs and gradients in bfloat16 beside the stock model's, both against the stock model in float32",
        1,
        _cases(
            [
                "parity-taxon/Qwen2.5-VL-3B/adamw/shared-varlen",
                "parity-taxon/Qwen2.5-VL-3B/adamw/shared-flex",
                "parity-taxon/Qwen2.5-VL-3B/adamw/shared-sdpa",
            ],
            50,
        ),
        {
            "log-prob mean": ("ours_logp_mean", ".1e"),
            "stock mean": ("stock_logp_mean", ".1e"),
            "log-prob max": ("ours_logp_max", ".1e"),
            "stock max": ("stock_logp_max", ".1e"),
            "gradient": ("ours_gradient", ".1e"),
            "stock gradient": ("stock_gradient", ".1e"),
        },
        "mean log-prob error and gradient error are at most 1.2 times the stock model's",
    ),
    "profile": Part(
        "one packed row of 16,384 tokens under the profiler: launches, host waits, idle share of the GPU",
        2,
        (Measure("row", "gpu_profile:one_row", 70, ADAPTERS),),
        {
            "s": ("seconds", ".2f"),
            "kernel launches": ("launches", ","),
            "host waits": ("host_waits", ","),
            "GPU idle": ("idle_share", ".1%"),
            "longest kernels": ("longest", ""),
        },
    ),
    "sharding": Part(
        "FSDP2 over NCCL in a world of one process, beside the same update unsharded",
        3,
        (
            Measure("Qwen2.5-VL-3B", "gpu_shards:sharded_update", 75, SHARDING, {"model": "Qwen2.5-VL-3B"}),
            Measure("Qwen3.5-9B-quarter", "gpu_shards:forked_units", 90, SHARDING, {"model": "Qwen3.5-9B-quarter"}),
        ),
        {
            "s": ("seconds", ".2f"),
            "peak GiB": ("peak_gib", ".1f"),
            "log-prob mean gap": ("logp_mean", ".1e"),
            "gradient gap": ("gradient", ".1e"),
            "gaps of another packing": ("repacked", ""),
        },
        "sharding moves log-probs and gradients no more than packing the same group into shorter rows does",
    ),
    "transport": Part(
        "weights on their way to an engine: gathered from shards, copied to main memory, sent to another process",
        2,
        (Measure("Qwen2.5-VL-7B", "gpu_transfer:handover", 60, SHARDING, {"model": "Qwen2.5-VL-7B"}),),
        {"GB": ("gigabytes", ".1f"), "s": ("seconds", ".2f"), "GB/s": ("gigabytes_per_second", ".2f")},
    ),
    "checkpoints": Part(
        "a checkpoint of weights and moments: how long it holds training up, and what it takes of main memory",
        3,
        (Measure("save", "gpu_transfer:saves", 90, COMMANDS),),
        {
            "GB": ("gigabytes", ".1f"),
            "held up, first, s": ("held_first", ".2f"),
            "held up, s": ("held_best", ".2f"),
            "whole after, s": ("whole_best", ".2f"),
            "main memory, peak GiB": ("host_peak_gib", ".1f"),
        },
    ),
    "runs": Part(
        "`vlmrl train` with a random 3B model: two steps, killed and resumed, short of memory, `check --deep`",
        3,
        (Measure("Qwen2.5-VL-3B", "gpu_runs:commands", 270, COMMANDS, {"model": "Qwen2.5-VL-3B"}),),
        {
            "exit code": ("exit_code", ""),
            "s": ("seconds", ".0f"),
            "s a step": ("step_seconds", ".2f"),
            "update, s": ("update_seconds", ".2f"),
            "rollout tokens/s": ("rollout_tokens_per_s", ",.0f"),
            "peak GiB": ("peak_gib", ".1f"),
        },
        "the command ends as it should: see the note of each line",
    ),
}


def missing(needs: Sequence[str]) -> list[str]:
    """The modules among these that this Python cannot find."""
    return [name for name in needs if importlib.util.find_spec(name) is None]


FACTS = """
import json, sys, torch
on_gpu = torch.cuda.is_available() and not int(sys.argv[1])
print(json.dumps({"device": torch.cuda.get_device_name() if on_gpu else "CPU", "torch": torch.__version__}))
"""


@cache
def facts_of(smoke: bool) -> dict[str, Any]:
    """Device and versions, for every line. Asked of another process: this one must hold no memory of the GPU."""
    facts = {"device": "unknown", "torch": None, "transformers": None, "smoke": smoke}
    if missing(CORE):
        return facts
    done = subprocess.run([sys.executable, "-c", FACTS, str(int(smoke))], capture_output=True, text=True, check=True)
    return facts | {"transformers": metadata.version("transformers"), **json.loads(done.stdout)}


def run_here(name: str, target: str, args: Mapping[str, Any], smoke: bool, lines: Path) -> None:
    """Run one measurement in this process; each row is written to `lines` as soon as it is there."""
    module, _, function = target.partition(":")
    run: Callable[..., Iterator[Row]] = getattr(import_module(module), function)
    with lines.open("a", encoding="utf-8") as file:
        for row in run(smoke, **args):
            file.write(json.dumps({"outcome": "done", **row, "measure": name}) + "\n")
            file.flush()


def run_apart(part: str, measures: Sequence[Measure], smoke: bool, seconds: float, log: Path) -> list[Row]:
    """Run measurements of a part in a process of their own, which ends with all that it started.

    Args: seconds: limit of the process.      log: file that what they print is added to.
    Returns: their lines; after them one that says what went wrong, if anything did.
    """
    names = [m.name for m in measures]
    line = {"part": part, "measure": names[0], "case": names[0], "ok": None, "note": "", **facts_of(smoke)}
    lacking = missing([module for m in measures for module in m.needs])
    if lacking:
        return [line | {"outcome": f"skipped: needs {', '.join(dict.fromkeys(lacking))}"}]
    with tempfile.TemporaryDirectory(prefix="gpu-day-") as folder:
        lines, printed = Path(folder, "lines.jsonl"), Path(folder, "printed.txt")
        here = [{"name": m.name, "target": m.target, "args": dict(m.args)} for m in measures]
        order = json.dumps({"parent": os.getpid(), "measures": here})
        command = [sys.executable, __file__, "--out", str(lines), "--here", order]
        environment = os.environ | {"TMPDIR": folder, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        if any(m.times_compiling for m in measures):
            environment[CACHE] = str(Path(folder, "inductor"))
        else:
            environment.setdefault(CACHE, str(Path.home() / ".cache" / "vlmrl-gpu-day"))
        with printed.open("wb") as output:
            process = subprocess.Popen(
                [*command, "--smoke"] if smoke else command,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end_all(process)
        text = printed.read_text("utf-8", "replace")
        with log.open("a", encoding="utf-8") as file:
            file.write(f"=== {part}/{' '.join(names)}: exit code {code}\n{text[-LOG_CHARACTERS:]}\n")
        rows = [line | row for row in _json_lines(lines)]
    if code is None:
        rows.append(line | {"outcome": f"not done in {seconds:.0f} s"})
    elif code:
        last = (text.strip().splitlines() or ["it printed nothing"])[-1]
        rows.append(line | {"outcome": f"failed, exit code {code}", "note": last[:300]})
    return rows


def _json_lines(path: Path) -> list[Row]:
    """The lines of a file, without a last one that a kill cut short."""
    text = path.read_text("utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _end_all(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started: nothing of a measurement may keep the GPU."""
    if process.poll() is None:
        kill_all(lambda: [process.pid, *descendants(process.pid)])
    process.wait()


def go_on_watched(parent: int, folder: Path) -> None:
    """Go on in a child of this process, which waits and ends the child, with all that it started, if `parent` ends.

    A parent that is killed cannot do that itself.
    Args: folder: files of the measurement, which go too then.
    """
    adopt_orphans()
    me, child = os.getpid(), os.fork()
    if child == 0:
        die_with_parent(me)
        return
    ended, status = 0, 0
    while not ended and os.getppid() == parent:
        time.sleep(TICK_SECONDS)
        ended, status = os.waitpid(child, os.WNOHANG)
    kill_all(lambda: descendants(me))
    if not ended:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def read_lines(path: Path, smoke: bool) -> list[Row]:
    """The lines of earlier calls of the same size; of each measurement those of its last attempt."""
    rows = [r for r in _json_lines(path) if r["smoke"] == smoke]
    last = {(r["part"], r["measure"]): r["attempt"] for r in rows}
    return [r for r in rows if r["attempt"] == last[r["part"], r["measure"]]]


def is_finished(rows: Sequence[Row]) -> bool:
    """Return whether these lines end a measurement. Too little memory is a result; a failure is not."""
    return bool(rows) and not any(r["outcome"].startswith(("failed", "not done", "skipped")) for r in rows)


def tables(rows: Sequence[Row]) -> str:
    """The results as Markdown: a heading, the criterion and a table for each part."""
    texts = []
    for name, part in PARTS.items():
        chosen = [r for r in rows if r["part"] == name]
        if not chosen:
            continue
        shown = [h for h, (key, _) in part.columns.items() if any(r.get(key) is not None for r in chosen)]
        noted = any(r["note"] for r in chosen)
        head = ["case", "outcome", *(["ok"] if part.criterion else []), *shown, *(["note"] if noted else [])]
        body = [[_cell(value) for value in _values(row, part, shown, noted)] for row in chosen]
        devices = ", ".join(sorted({r["device"] for r in chosen}))
        criterion = f" Ok: {part.criterion}." if part.criterion else ""
        texts.append(
            "\n".join(
                [
                    f"**{name}** ({devices}): {part.about}.{criterion}",
                    "",
                    *(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body)),
                ]
            )
        )
    return "\n\n".join(texts)


def _values(row: Row, part: Part, shown: Sequence[str], noted: bool) -> Iterator[str]:
    yield row["case"]
    yield row["outcome"]
    if part.criterion:
        yield {True: "yes", False: "**no**", None: "-"}[row["ok"]]
    for heading in shown:
        key, form = part.columns[heading]
        yield "-" if row.get(key) is None else format(row[key], form)
    if noted:
        yield row["note"]


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")


def carried(parts: Sequence[str], have: Sequence[str]) -> list[str]:
    """Pins of the packages that these parts need and a machine with torch, torchvision and transformers may lack.

    Read off this environment: run it in the project's own. What the parts import by name is listed even where this
    environment's transformers brings it along: an older one may not.
    Args: have: names of packages that the machine has besides.
    """
    modules = {m for name in parts for measure in PARTS[name].measures for m in measure.needs} - set(CORE)
    owners = metadata.packages_distributions()
    roots = {_plain(owners[m][0]) for m in modules if m in owners} - set(map(_plain, have))
    present = _closure({"torch", "torchvision", "transformers", *map(_plain, have)}, without=roots)
    return [f"{name}=={metadata.version(name)}" for name in sorted(_closure(roots) - present)]


def _closure(roots: set[str], without: Collection[str] = ()) -> set[str]:
    """These packages and all that they need, without extras, of those that are installed.

    Args: without: packages that are left out with what they alone need.
    """
    found: set[str] = set()
    left = list(roots)
    while left:
        name = left.pop()
        if name in found or name in without:
            continue
        try:
            required = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        left += [_plain(_name_of(r)) for r in required if "extra ==" not in r]
    return found


def _name_of(requirement: str) -> str:
    return next(iter("".join(c if c.isalnum() or c in "._-" else " " for c in requirement).split()))


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def check_size(folder: Path) -> None:
    """End with an error when these wheels, which a smoke run tries, are too large to be carried to a lent machine."""
    size = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
    room = CARRIED_BYTES - PROJECT_BYTES
    if size > room:
        message = (
            f"the wheels in {folder} take {size / 2**20:.1f} MiB; {room >> 20} MiB can be carried beside the project"
        )
        sys.exit(f"error: {message}\n\nhint: scripts/gpu-day --carry --have NAMES leaves out what the machine has")


def use_wheels(folder: Path) -> None:
    """Unpack wheels into a folder beside them and let this process and those it starts import from there."""
    target = folder / "unpacked"
    for wheel in sorted(folder.glob("*.whl")):
        mark = target / f".{wheel.name}"
        if not mark.exists():
            with zipfile.ZipFile(wheel) as file:
                file.extractall(target)
            mark.touch()
    sys.path.insert(0, str(target))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(target), os.environ.get("PYTHONPATH", "")]))


def show_list() -> str:
    """The parts, for people."""
    lines = []
    for name, part in PARTS.items():
        minutes = sum(m.limit_seconds for m in part.measures) / 60
        lines.append(f"{name:12} call {part.call}, at most {minutes:4.1f} min: {part.about}")
        lines += [f"{'':14}{m.name}  (needs {', '.join(m.needs)})" for m in part.measures]
    return "\n".join(lines)


def run_parts(names: Sequence[str], out: Path, minutes: float, smoke: bool) -> bool:
    """Run what these parts have left to do; a toy run takes a process for each part instead of each measurement.

    A measurement may take longer than its limit as long as those after it keep theirs.
    Returns: whether all of it was reached before the time was over.
    """
    end = time.monotonic() + 60 * minutes
    earlier = read_lines(out, smoke)
    before = lambda part, m: [r for r in earlier if (r["part"], r["measure"]) == (part, m.name)]  # noqa: E731
    due: list[tuple[str, list[Measure]]] = []
    for part in names:
        measures = [m for m in PARTS[part].measures if not is_finished(before(part, m))]
        due += [(part, measures)] if smoke and measures else [(part, [m]) for m in measures]
    for index, (part, measures) in enumerate(due):
        later = sum(m.limit_seconds for _, others in due[index + 1 :] for m in others)
        limit, left = sum(m.limit_seconds for m in measures), end - time.monotonic()
        if left < min(20, limit):
            print(f"no time left for {part}/{measures[0].name}; the same command goes on there", file=sys.stderr)
            return False
        allowed = min(left, max(limit, left - later))
        rows = run_apart(part, measures, smoke, allowed, out.with_suffix(".log"))
        if allowed < limit and rows[-1]["outcome"].startswith("not done"):
            continue  # what the call's own end cut off is left for the next one
        attempt = 1 + max((r["attempt"] for m in measures for r in before(part, m)), default=0)
        with out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(r | {"attempt": attempt}) + "\n" for r in rows)
        for r in rows:
            print(
                f"{part}/{r['case']}: {r['outcome']}{' NOT OK' if r['ok'] is False else ''}  {r['note']}",
                file=sys.stderr,
                flush=True,
            )
    return True


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="scripts/gpu-day"
    )
    parser.add_argument("--part", nargs="+", choices=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--call", type=int, choices=(1, 2, 3, 4), help="the parts of one of four calls")
    parser.add_argument("--minutes", type=float, default=CALL_MINUTES, help="when this call ends (default: 9)")
    parser.add_argument("--out", type=Path, default=Path("gpu-day.jsonl"), help="JSON lines; the log goes beside it")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to import from (see --carry)")
    parser.add_argument(
        "--have",
        nargs="*",
        default=USUALLY_THERE,
        help=f"with --carry: packages that the machine has already; default: {', '.join(USUALLY_THERE)}",
    )
    parser.add_argument("--smoke", action="store_true", help="toy sizes on the CPU, without a time limit of the call")
    parser.add_argument("--json", action="store_true", help="the lines on stdout in place of the tables")
    parser.add_argument("--list", action="store_true", help="show the parts and stop")
    parser.add_argument("--table", action="store_true", help="show the results in --out and stop")
    parser.add_argument("--carry", action="store_true", help="name the packages to bring along and stop")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.wheels:
        if options.smoke and not options.here:
            check_size(options.wheels.resolve())
        use_wheels(options.wheels.resolve())
    if options.here:
        order = json.loads(options.here)
        go_on_watched(order["parent"], options.out.parent)
        for measure in order["measures"]:
            run_here(measure["name"], measure["target"], measure["args"], options.smoke, options.out)
        return
    names = [n for n, p in PARTS.items() if n in (options.part or PARTS) and options.call in (None, p.call)]
    if options.list:
        print(show_list())
        return
    if options.carry:
        print("\n".join(carried(names, options.have)))
        print(HOW_TO_CARRY, file=sys.stderr)
        return
    if not options.table:
        if not options.smoke and facts_of(False)["device"] == "CPU":
            sys.exit(f"error: torch sees no GPU here\n\nhint: {NO_GPU_HINT}")
        options.out.parent.mkdir(parents=True, exist_ok=True)
        end_on_sigterm()
        minutes = 24 * 60 if options.smoke else min(options.minutes, CALL_MINUTES)
        try:
            run_parts(names, options.out, minutes, options.smoke)
        except KeyboardInterrupt:
            sys.exit("interrupted; the same command goes on there")
    rows = [r for r in read_lines(options.out, options.smoke) if r["part"] in names]
    print("\n".join(json.dumps(r) for r in rows) if options.json else tables(rows))
    if options.smoke and not all(r["outcome"] == "done" and r["ok"] is not False for r in rows):
        sys.exit("error: a line above is not done, or not ok")


if __name__ == "__main__":
    main()
