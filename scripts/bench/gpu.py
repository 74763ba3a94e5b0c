"""How fast, how exact and how large a training update is on this GPU, with random weights of real shapes:

    python scripts/bench/gpu.py --out gpu.jsonl [--minutes 9] [--cases 'taxon/*3B*'] [--paths shared] [--backends flex]
    python scripts/bench/gpu.py --smoke          every case at a toy size on a CPU

Needs torch, transformers and, for adapters, peft. Each case runs in a process of its own and adds one line to `--out`;
started again, the script goes on with what is not there yet. An update is making the rows, forward, backward with
gradient checkpointing, gradient clipping and the optimizer's step, over one group:

    taxon   two images of 800 pixels, about 300 tokens of text, 16 responses of 300 tokens
    vfig    a prompt of 9,000 tokens with an image, 8 responses of up to 8,500
    text    one sequence of 16,384 tokens without an image, as prime-rl measures (PUBLISHED)

    padded  transformers' own forward, each response behind its own copy of the prompt, padded to the longest
    packed  the same sequences one after another in rows, nothing padded
    shared  the prompt once for all responses

All paths share the head (log-probs chunk by chunk), the loss, the optimizer and the token budget of a row: the
difference is the path's alone. Padded batches run under SDPA: `sdpa` with vlmrl's attention in the vision tower, as the
other paths have it; `stock` without it.

MFU is FLOPs by formula (flops.py beside it: nothing recomputed counts) over time and the dense bfloat16
peak: `done` of what the path computes, its padding included; `worth` of what the padded path would have computed.
`parity` compares a bfloat16 pass with the stock model's in float32. `cap` says whether one rank of N would fit:
sharding is computed (`Rank`), the pass is measured under the allocator's own limit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import transformers
from flops import padded_work, prime_rl_flops, training_flops
from gpu_world import GIB, Case, World, make_config, one_pass, rank_of, shape_of, use_attention

from vlmrl.model.attention import KERNELS, has_kernels

if TYPE_CHECKING:
    from vlmrl.setup.memory_sizes import Gpu

PEAKS = {
    "NVIDIA H200": 989.4e12, "NVIDIA H200 NVL": 835.5e12, "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H100 NVL": 835.5e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA H20": 148e12, "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12, "NVIDIA A100 80GB PCIe": 312e12, "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA L40S": 362e12, "NVIDIA B200": 2250e12,
}  # fmt: skip
"""torch's name of a device -> dense bfloat16 FLOPs a second, by its data sheet. Names are matched whole: "H20" is part
of "H200", and has a seventh of its peak."""
PUBLISHED = "prime-rl, Qwen3-4B, one H100, FlashAttention 3, compiled: 6,229 tokens/s, MFU 21.7%, 23.3 GiB"
"""`RL LoRA(r=16)`, sequences of 16,384 tokens, recomputed activations: benchmarks/results/BENCHMARKS.md of
PrimeIntellect-ai/prime-rl, January 2026."""
TEXT_NOTE = f"no image; the text model has Qwen3-4B's shape, the vision tower is idle; published: {PUBLISHED}"


def plan(smoke: bool) -> list[Case]:
    """All cases, the most telling first. At the toy size there is no varlen kernel: SDPA stands in for it."""
    fast = "sdpa" if smoke else "varlen"
    small, large = "Qwen2.5-VL-3B", "Qwen2.5-VL-7B"
    kahan: dict[str, Any] = {"optimizer": "adamw_bf16_kahan"}  # 14 bytes a weight; with float32 masters 18
    lora: dict[str, Any] = {"rank": 64}
    long: dict[str, Any] = {"rank": 64, "tokens_per_row": 65_536}
    three = (("shared", fast), ("packed", fast), ("padded", "sdpa"))
    cases = [Case("update", "taxon", small, p, b) for p, b in three]
    cases += [Case("update", "taxon", small, "shared", fast, recompute=False, compiled=c) for c in (False, True)]
    cases += [Case("update", "taxon", small, "shared", fast, recompute=False, attention=a) for a in KERNELS]
    # All weights of a 7B model with kahan's 14 bytes each, 116 GB, fit an H200; an H100 has room for adapters.
    cases += [Case("update", "taxon", large, p, b, **way) for way in (kahan, lora) for p, b in three]
    cases += [Case("update", "text", "Qwen3-VL-4B", "shared", fast, rank=16)]
    cases += [
        Case("update", "taxon", small, p, b)
        for p, b in (
            ("shared", "flex"),
            ("shared", "sdpa"),
            ("packed", "flex"),
            ("packed", "sdpa"),
            ("padded", "stock"),
        )
    ]
    cases += [Case("parity", "taxon", small, "shared", b) for b in dict.fromkeys((fast, "flex", "sdpa"))]
    cases += [Case("parity", "taxon", small, "shared", fast, compiled=True)]
    cases += [Case("cap", "taxon", small, "shared", fast, cap_gib=24, **lora)]
    cases += [Case("cap", "taxon", large, "shared", fast, cap_gib=32, ranks=2, **lora)]
    cases += [Case("cap", "taxon", large, "shared", fast, cap_gib=40, ranks=4, **kahan)]
    cases += [Case("update", "vfig", "Qwen3-VL-4B", p, b, **long) for p, b in (*three, ("shared", "flex"))]
    cases += [Case("update", "taxon", "Qwen3-VL-4B", p, b) for p, b in three]
    cases += [Case("update", "taxon", "Qwen3.5-9B", p, "sdpa", **lora) for p in ("shared", "padded")]
    cases += [Case("update", "vfig", "Qwen3.5-9B", "shared", "sdpa", **long)]
    return list(dict.fromkeys(cases))


def seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Time until the device has finished."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - start


def measure_update(case: Case, smoke: bool) -> dict[str, Any]:
    """Seconds, tokens, FLOPs and memory of an update."""
    started, world = time.perf_counter(), World(case, smoke)
    works = world.update()  # warms up: kernels, compilation, optimizer state
    cuda = world.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    while len(times) < (1 if smoke else 5) and (not times or time.perf_counter() - started < case.limit_seconds / 2):
        times.append(seconds(world.update, world.device))
    shape, middle = shape_of(case, smoke), statistics.median(times)
    done = sum(training_flops(world.model, work).total for work in works)
    worth = training_flops(world.model, padded_work(shape.prompt, shape.responses, shape.grids)).total
    tokens, computed = sum(shape.responses), sum(work.tokens for work in works)
    name = torch.cuda.get_device_name() if cuda else "CPU"
    peak = PEAKS.get(name) if world.backward else None
    text = {}
    if case.work == "text":
        counted = prime_rl_flops(world.model, computed)
        text = {"mfu_prime_rl": counted / middle / peak if peak else None}
    return {
        "device": name,
        "seconds": middle,
        "all_seconds": times,
        "backward": world.backward,
        "response_tokens": tokens,
        "computed_tokens": computed,
        "response_tokens_per_s": tokens / middle,
        "computed_tokens_per_s": computed / middle,
        "tflop_done": done / 1e12,
        "tflop_worth": worth / 1e12,
        "mfu_done": done / middle / peak if peak else None,
        "mfu_worth": worth / middle / peak if peak else None,
        "peak_gib": torch.cuda.max_memory_allocated() / GIB if cuda else None,
        **text,
        "note": "; ".join(filter(None, [_note(name, world.backward), TEXT_NOTE if text else ""])),
    }


def _note(device: str, backward: bool) -> str:
    if not backward:
        return "forward only: no backward pass on a CPU"
    return "" if device in PEAKS else f"no MFU: the peak of `{device}` is not in the table"


def measure_parity(case: Case, smoke: bool) -> dict[str, Any]:
    """A bfloat16 pass, and the stock model's own, against the stock model in float32, all of the same weights."""
    world = World(case, smoke)
    model, items = world.model, world.items

    def outcome(path: str) -> tuple[Any, list[Any]]:
        logp = one_pass(path, world.policy, items, case.tokens_per_row, world.backward)[0]
        gradients = [p.grad for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        return logp, gradients

    ours = outcome(case.path)
    world.uncompile()
    use_attention(model, dataclasses.replace(case, path="padded", backend="stock"))
    stock = outcome("padded")
    model.float()
    prompt = items[0].prompt
    prompt = dataclasses.replace(prompt, images=prompt.images | {"pixel_values": prompt.images["pixel_values"].float()})
    items[:] = [dataclasses.replace(item, prompt=prompt) for item in items]
    exact = outcome("padded")
    found: dict[str, Any] = {"note": "" if world.backward else _note("", False)}
    for who, (logp, gradients) in (("ours", ours), ("stock", stock)):
        gap = (logp - exact[0]).abs()
        pairs = [(a, b) for a, b in zip(gradients, exact[1], strict=True) if b is not None]
        off = sum(float((b if a is None else a.float() - b).square().sum()) for a, b in pairs)
        norm = sum(float(b.square().sum()) for _, b in pairs)
        found |= {
            f"{who}_logp_mean": float(gap.mean()),
            f"{who}_logp_max": float(gap.max()),
            f"{who}_gradient": math.sqrt(off / norm) if norm else None,
        }
    return found


def measure_cap(case: Case, smoke: bool) -> dict[str, Any]:
    """Return whether a pass fits where one of `ranks` GPUs of `cap_gib` has its share of the states.

    The whole states are on this GPU, so the allocator's limit is the cap plus what sharding would take away. The
    optimizer steps before the limit is set: its working copies would be a rank's share, too.
    """
    world = World(case, smoke)
    rank = rank_of(world.model, case.optimizer, case.ranks)
    spared = rank.states - rank.needs
    limit = case.cap_gib * GIB + spared
    found = {
        "states_gib": rank.states / GIB,
        "rank_states_gib": rank.states / case.ranks / GIB,
        "rank_needs_gib": rank.needs / GIB,
        "limit_here_gib": limit / GIB,
    }
    world.update()
    total = torch.cuda.get_device_properties(0).total_memory if world.device.type == "cuda" else 0
    if limit > total:
        world.gradients()
        return found | {"fits": None, "note": f"computed alone: this device has {total / GIB:.0f} GiB"}
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(limit / total)
    torch.cuda.reset_peak_memory_stats()
    try:
        world.gradients()
    except torch.OutOfMemoryError:
        return found | {"fits": False, "note": ""}
    most = torch.cuda.max_memory_allocated()
    return found | {"fits": True, "rank_peak_gib": (most - spared) / GIB, "note": ""}


MEASURES = {"update": measure_update, "parity": measure_parity, "cap": measure_cap}


def run_case(case: Case, smoke: bool) -> dict[str, Any]:
    """One case in this process. Out of memory is a result; every other error is the caller's to see."""
    facts = {
        "case": case.name,
        **dataclasses.asdict(case),
        "smoke": smoke,
        "outcome": "done",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    try:
        return facts | MEASURES[case.kind](case, smoke)
    except torch.OutOfMemoryError as error:
        at = torch.cuda.max_memory_allocated() / GIB
        return facts | {"outcome": f"OOM at {at:.1f} GiB", "peak_gib": at, "note": str(error).split(". ")[0]}


ALLOWED_ERROR = 1.2
"""How much larger than the stock model's an error in bfloat16 may be: sums in another order differ by that much."""


def measure_cases(smoke: bool, pattern: str) -> Iterator[dict[str, Any]]:
    """Results of the cases of this name or pattern, for the GPU day; of `parity` with a mark, `ok`."""
    pattern = pattern.replace("varlen", "sdpa") if smoke else pattern
    for case in (c for c in plan(smoke) if fnmatchcase(c.name, pattern)):
        if case.attention in KERNELS and not smoke and not has_kernels(case.attention):
            yield {"case": case.name, "outcome": f"skipped: needs {KERNELS[case.attention][1]}"}
            continue
        result = run_case(case, smoke)
        pairs = [("ours_logp_mean", "stock_logp_mean"), ("ours_gradient", "stock_gradient")]
        known = [(result[a], result[b]) for a, b in pairs if result.get(a) is not None]
        yield result | {"ok": all(a <= ALLOWED_ERROR * b for a, b in known) if known else None}


def first_that_fits(cases: Sequence[Case], smoke: bool, gpu: Gpu | None = None) -> tuple[Case, str]:
    """(the first of these cases whose update fits the GPU by vlmrl's memory plan, else the last one; the plan's words).

    Args: gpu: None = the one of this machine.
    """
    from vlmrl.model.model_facts import model_facts
    from vlmrl.recipe.load import load_recipe
    from vlmrl.setup.memory_fit import Target, find_cluster
    from vlmrl.setup.memory_plan import TIGHT, UPDATE, make_plan
    from vlmrl.setup.memory_sizes import PromptLengths

    words = ""
    for case in cases:
        shape = shape_of(case, smoke)
        prompts = PromptLengths(shape.prompt, sum(h * w // 4 for h, w in shape.grids), max(shape.responses))
        with tempfile.TemporaryDirectory() as folder:
            make_config(case.model, smoke).save_pretrained(folder)
            values = {
                "model.path": folder,
                "model.device": "auto",
                "model.gradient_checkpointing": "true",
                "optim.name": case.optimizer,
                "train.tokens_per_row": case.tokens_per_row,
                "rollout.engine": "torch",
            } | ({"lora.rank": case.rank} if case.rank else {})
            loaded = load_recipe("fungi_im", overrides=[f"{key}={value}" for key, value in values.items()])
            cluster = find_cluster(loaded, Target(gpu=gpu))
            plan = make_plan(loaded, model_facts(loaded.recipe.model), cluster, prompts)
        needs = next(phase.total for phase in plan.phases if phase.name == UPDATE)
        words = f"by the memory plan {needs / GIB:.0f} of {cluster.each_bytes / GIB:.0f} GiB"
        if needs <= TIGHT * cluster.each_bytes:
            return case, words
    return cases[-1], words


def measure_first_that_fits(smoke: bool, patterns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Results of the first case that fits this GPU, for the GPU day."""
    names = [pattern.replace("varlen", "sdpa") if smoke else pattern for pattern in patterns]
    by_name = {case.name: case for case in plan(smoke)}
    case, words = first_that_fits([by_name[name] for name in names], smoke)
    for result in measure_cases(smoke, case.name):
        yield result | {"note": "; ".join(filter(None, [result["note"], words]))}


def run_apart(case: Case, limit: float) -> dict[str, Any]:
    """One case in a process of its own, with a time limit in seconds."""
    facts = {"case": case.name, **dataclasses.asdict(case), "smoke": False, "note": ""}
    command = [sys.executable, __file__, "--one", case.name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return facts | {"outcome": f"not done in {limit:.0f} s"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return facts | {"outcome": f"failed, exit code {done.returncode}", "note": last[:300]}
    return json.loads(done.stdout.splitlines()[-1])


COLUMNS: dict[str, dict[str, tuple[str, str]]] = {
    "update": {
        "s an update": ("seconds", ".2f"),
        "response tokens/s": ("response_tokens_per_s", ",.0f"),
        "tokens computed": ("computed_tokens", ","),
        "MFU done": ("mfu_done", ".1%"),
        "MFU worth": ("mfu_worth", ".1%"),
        "peak GiB": ("peak_gib", ".1f"),
    },
    "parity": {
        "log-prob mean": ("ours_logp_mean", ".1e"),
        "stock mean": ("stock_logp_mean", ".1e"),
        "log-prob max": ("ours_logp_max", ".1e"),
        "stock max": ("stock_logp_max", ".1e"),
        "gradient": ("ours_gradient", ".1e"),
        "stock gradient": ("stock_gradient", ".1e"),
    },
    "cap": {
        "fits": ("fits", ""),
        "states of a rank, GiB": ("rank_states_gib", ".1f"),
        "with what is gathered": ("rank_needs_gib", ".1f"),
        "peak of a rank": ("rank_peak_gib", ".1f"),
    },
}
"""Kind -> heading -> (key of the result, format). Parity: bfloat16 against float32, ours and the stock model's."""


def table(results: list[dict[str, Any]]) -> str:
    """The results as Markdown, a table for each kind."""
    parts = []
    for kind, columns in COLUMNS.items():
        rows = [["case", "outcome", *columns, "note"], ["---"] * (len(columns) + 3)]
        for r in results:
            if r["kind"] == kind:
                values = [(r.get(key), form) for key, form in columns.values()]
                shown = ["-" if value is None else format(value, form) for value, form in values]
                rows.append([r["case"], r["outcome"], *shown, r["note"].replace("|", "/")])
        if len(rows) > 2:
            parts.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
    return "\n\n".join(parts)


def choose(options: argparse.Namespace) -> list[Case]:
    """The cases asked for."""
    keep = lambda value, wanted: not wanted or any(fnmatchcase(value, w) for w in wanted)  # noqa: E731
    return [
        case
        for case in plan(options.smoke)
        if keep(case.name, options.cases) and keep(case.path, options.paths) and keep(case.backend, options.backends)
    ]


def read_results(path: Path | None, smoke: bool) -> dict[str, dict[str, Any]]:
    """Results of earlier runs by case; the last one counts."""
    lines = path.read_text("utf-8").splitlines() if path and path.exists() else []
    results = [json.loads(line) for line in lines]
    return {r["case"]: r for r in results if r["smoke"] == smoke}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON-lines file; cases in it are not run again")
    parser.add_argument("--cases", nargs="*", help="names or patterns such as 'taxon/*7B*', 'cap-*'; see --list")
    parser.add_argument("--paths", nargs="*", help="padded, packed, shared")
    parser.add_argument("--backends", nargs="*", help="varlen, flex, sdpa, stock")
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="when to stop; what is under way then is left for later"
    )
    parser.add_argument("--smoke", action="store_true", help="toy sizes on the CPU, every case, in this process")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout in place of the table")
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        (case,) = [c for c in plan(options.smoke) if c.name == options.one]
        print(json.dumps(run_case(case, options.smoke)))
        return
    chosen = choose(options)
    if options.list or not chosen:
        print("\n".join(case.name for case in chosen or plan(options.smoke)))
        sys.exit(0 if options.list else "error: no case has such a name, path and backend; all are listed above")
    earlier = read_results(options.out, options.smoke)
    results: list[dict[str, Any]] = []
    end = time.monotonic() + 60 * options.minutes
    for case in chosen:
        if case.name in earlier:
            results.append(earlier[case.name])
            continue
        left = end - time.monotonic()
        result = run_case(case, True) if options.smoke else run_apart(case, max(1.0, min(left, case.limit_seconds)))
        if result["outcome"].startswith("not done") and left < case.limit_seconds:
            print(f"no time left for {case.name} and what follows it; the same command goes on", file=sys.stderr)
            break
        results.append(result)
        print(f"{case.name}: {result['outcome']} {result.get('seconds', '')}", file=sys.stderr, flush=True)
        if options.out:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
    print(json.dumps({"results": results}) if options.json else table(results))


if __name__ == "__main__":
    main()
