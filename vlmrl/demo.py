"""Demo: run all commands from data to evaluation on this machine, as a user would type them, with a tiny model.

Nothing is downloaded. Every command runs in a process of its own through the command line. This file only runs them in
order, makes the tiny model and compares the two evaluations at the end.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmrl.errors import DataError, VlmrlError

if TYPE_CHECKING:
    from vlmrl.recipe.schema import Data

TEXTS_FOR_TOKENIZER = 2000
"""Maximum number of dataset rows whose texts train the tokenizer."""
ANY_REWARD = "exact_match"
"""Built-in reward that is used to open rows when no response is scored, because a source needs some reward."""
TOOL_REPEATS = 50
"""Number of times that the tokenizer reads the description of the tools, which every prompt shows."""
MIN_PIXELS, MAX_PIXELS = 56 * 56, 224 * 224
"""Bounds of an image's area in pixels after resizing by the tiny model's processor."""
SHOWN = ("reward", "accuracy", "brier", "auc", "parse_failure")
"""Metrics of the table at the end of the demo, besides the accuracy of each level."""


class DemoError(VlmrlError):
    """Error: a command of the demo failed."""


@dataclass(frozen=True)
class Demo:
    """Task that the tiny model learns.

    Args:
        prep: words of the `vlmrl prep` command that makes the dataset, without its folder.
        sft, rl: shipped recipes of the two trainings.
        data: the data, in words.
        start: state at which the supervised training ends, in words.
        test: the rows of the test split, in words.
        unit: the independent units of the test split, in the plural.
        tools: whether the model calls tools, whose descriptions its tokenizer should know.
        sampling: options of the evaluations; () = one greedy response per row.
    """

    prep: tuple[str, ...]
    sft: str
    rl: str
    data: str
    start: str
    test: str
    unit: str
    tools: bool = False
    sampling: tuple[str, ...] = ()


DEMOS = {
    "digits": Demo(
        prep=("digits",),
        sft="digits_sft.toml",
        rl="digits_im.toml",
        data="pairs of real handwritten digits",
        start="until the format and about two of three answers are right",
        test="test pairs, from scans that neither has seen",
        unit="scans",
    ),
    "geometry": Demo(
        prep=("geometry3k", "--synthetic", "3000", "--topics", "squares", "--width", "112"),
        sft="geometry_sft.toml",
        rl="geometry_tiny.toml",
        data="drawn figures on squared paper, each with its shaded area",
        start="on 300 figures, until about half of the answers are right",
        test="test figures, which neither has seen",
        unit="figures",
    ),
    "boxes": Demo(
        prep=("grounding", "--synthetic", "3000", "--asks", "single", "--side", "84"),
        sft="grounding_sft.toml",
        rl="grounding_tiny.toml",
        data="drawn shapes, each with its exact box",
        start="on 400 images, until about half of the boxes overlap the true ones well",
        test="test images, which neither has seen",
        unit="images",
    ),
    "counting": Demo(
        prep=("counting", "--synthetic", "3000", "--side", "112", "--most", "5", "--asks", "all"),
        sft="counting_sft.toml",
        rl="counting_tiny.toml",
        data="drawn shapes, 1 to 5 in an image, each with its exact number",
        start="on 800 images, until about half of the counts are right",
        test="test images, which neither has seen",
        unit="images",
    ),
    "crop": Demo(
        prep=("crop", "--synthetic", "1500", "--side", "224", "--seen", "56", "--places", "2", "--right-looks", "0.3"),
        sft="crop_sft.toml",
        rl="crop_tiny.toml",
        data="drawn lines, too fine for the size at which the model sees them",
        start="until it calls the tool, at a place that is often wrong, and reads what it shows",
        test="test pictures, which neither has seen",
        unit="pictures",
        tools=True,
        sampling=("--sample", "1.0", "--n", "4"),
    ),
    "python": Demo(
        prep=("crop", "--synthetic", "1500", "--side", "224", "--seen", "56", "--places", "2", "--right-looks", "0.5"),
        sft="python_sft.toml",
        rl="python_tiny.toml",
        data="drawn lines, too fine for the size at which the model sees them",
        start="until it cuts a part with Python code, often the wrong one, and reads what it shows",
        test="test pictures, which neither has seen",
        unit="pictures",
        tools=True,
        sampling=("--sample", "1.0", "--n", "4"),
    ),
    "figures": Demo(
        prep=("figures", "--synthetic", "5000", "--simple", "--arrow-chance", "0", "--synthetic-bench", "600"),
        sft="figures_sft.toml",
        rl="figures_tiny.toml",
        data="drawn figures of one to three shapes, each with its SVG code",
        start="on 2,000 figures, until most answers can be drawn",
        test="test figures, which neither has seen",
        unit="figures",
    ),
}
"""Name of a demo -> what it is made of; the first is the default. The help of `vlmrl demo` lists the names."""


def make_model(
    data: Path, out: Path, *, seed: int, task: str = "table", rows: Path | None = None, width: int = 128
) -> int:
    """Write a tiny Qwen2.5-VL to `out`, with a tokenizer trained on the prompts and answers of some rows.

    Args:
        data: a dataset made by `vlmrl prep`, a table, or a recipe (.toml), whose columns and prompts are then used.
        task: the task, for a dataset that does not name one.
        rows: dataset in place of the recipe's first one.
        width: hidden width; models of other widths have the same tokenizer, so one can teach the other.
    Returns: the number of parameters.
    Raises: DataError when the rows cannot be read, RecipeError or ProblemsError when the recipe cannot be read,
        CheckpointError when `out` is not empty, DemoError for a width that is no multiple of 64.
    """
    from vlmrl.model.tiny import build_tiny
    from vlmrl.recipe.load import load_recipe
    from vlmrl.recipe.schema import Data

    if width % 64:
        raise DemoError(f"a model of width {width} cannot be made", hint="a multiple of 64, such as 128 or 192")
    is_recipe = data.suffix == ".toml"
    own = [f"data.0.path={rows}"] if rows else []
    entries = load_recipe(data, overrides=own).recipe.data if is_recipe else [Data(path=str(data), task=task)]
    try:
        texts = [text for entry in entries for text in _texts_of(entry)]
    except DataError as error:
        if is_recipe:
            raise
        also = "a recipe can name the columns: --data RECIPE.toml"
        raise DataError(error.message, where=error.where, hint="; ".join(filter(None, (error.hint, also)))) from error
    build_tiny(out, texts, seed=seed, hidden=width, min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS)
    return _num_parameters(out)


def _texts_of(entry: Data) -> Iterator[str]:
    """Yield prompts and answers of the first rows of a `[[data]]` entry. Its reward is neither needed nor opened."""
    from vlmrl.data.dataset import INFO_FILE
    from vlmrl.environments.calls import tools_text
    from vlmrl.recipe.schema import Reward
    from vlmrl.tasks.source import open_source

    source = open_source(entry.model_copy(update={"reward": ANY_REWARD, "rewards": []}), Reward())
    rows = [source.rows[i] for i in range(min(TEXTS_FOR_TOKENIZER, len(source.rows)))]
    is_prepared = (Path(entry.path) / INFO_FILE).is_file()  # if so, prompts come from a template, answers from traces
    for row in rows[:50] if is_prepared else rows:
        yield from (message.content for message in source.messages(row))
        if not is_prepared:
            yield from (str(value) for value in row.truth.values())
    if source.environment is not None:
        yield from [tools_text(source.environment.of(rows[0]).tools, "hermes")] * TOOL_REPEATS
    if source.task.trace is not None:
        rng = random.Random(0)
        yield from (source.task.correct_response(row, rng) for row in rows)


def _num_parameters(folder: Path) -> int:
    from safetensors import safe_open

    count = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "np") as file:
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 (no dict)
    return count


def run_demo(out: Path, seed: int, recipes: Path, say: Callable[[str], None], task: str) -> dict[str, Any]:
    """Run the chain. Return the values that `vlmrl demo --json` prints.

    Args:
        recipes: folder of the demo's recipes.
        task: key of `DEMOS`.
    Raises: DemoError when a command fails; its output is on the terminal.
    """
    from vlmrl.model.gpus import missing_gpus

    start = time.perf_counter()
    demo, data, runs = DEMOS[task], out / "data" / task, out / "runs"
    model, merged, report = out / f"model-{seed}", out / f"merged-{seed}", out / f"report-{seed}.html"
    shutil.rmtree(model, ignore_errors=True)
    shutil.rmtree(merged, ignore_errors=True)
    tag = f"seed{seed}"
    say(f"1/8  Data: {demo.data}")
    vlmrl("prep", *demo.prep, "--out", data, "--force", say=say)
    say(f"2/8  Model: a tiny Qwen2.5-VL, made now in {model}")
    shown, rows = (recipes / demo.sft, data) if demo.tools else (data, None)
    say(f"     {make_model(shown, model, seed=seed, rows=rows):,} parameters")
    common = ["--set", f"data.0.path={data}", "--set", f"train.seed={seed}", "--runs", runs, "--tag", tag]
    if missing := missing_gpus():
        say(f"     On the CPU: {missing[0]}")
        common += ["--set", "model.device=cpu"]
    say(f"3/8  Supervised start: {demo.start}")
    sft = vlmrl("sft", recipes / demo.sft, "--set", f"model.path={model}", *common, "--json", say=say)["run"]
    say("4/8  Reinforcement learning: GRPO on the model's own answers")
    rl = vlmrl("train", recipes / demo.rl, "--set", f"model.path={sft}", *common, "--json", say=say)["run"]
    say(f"5/8  Evaluation of both models on {demo.test}")
    which = ["--checkpoint", chosen_checkpoint(runs / rl)]
    if which[1] == "last":
        say("     No step of the reinforcement learning was better on validation than its start: the last one is shown")
    for run, options in ((sft, []), (rl, which)):
        words = ["--split", "test", "--name", "test", *demo.sampling, "--runs", runs, "--json"]
        vlmrl("eval", run, *options, *words, say=say)
    say("6/8  Merge into a Hugging Face folder, which is reloaded and compared")
    vlmrl("merge", rl, *which, "--out", merged, "--runs", runs, say=say)
    say("7/8  Reward check: every saved rollout is scored again")
    vlmrl("reward-check", rl, "--runs", runs, say=say)
    say("8/8  Report")
    vlmrl("report", sft, rl, "-o", report, "--runs", runs, say=say)
    comparison = compare(runs / sft, runs / rl)
    return comparison | {
        "unit": demo.unit,
        "seconds": round(time.perf_counter() - start, 1),
        "run": rl,
        "sft_run": sft,
        "seed": seed,
        "report": str(report),
        "model": str(merged),
    }


def chosen_checkpoint(run: Path) -> str:
    """Return the checkpoint of a run to show: the best one, or the last one if none was better than the start."""
    from vlmrl.store.manifest import read_manifest

    best = read_manifest(run).best
    return "last" if best is not None and best.step == 0 else "best"


def compare(sft_run: Path, rl_run: Path) -> dict[str, Any]:
    """Return the metrics of both test evaluations, and their paired difference with its 95% interval."""
    from vlmrl.evaluate.compare import differences as differences_of
    from vlmrl.evaluate.records import read_evaluation
    from vlmrl.store.layout import eval_dir

    sft, rl = (read_evaluation(eval_dir(run, "test")) for run in (sft_run, rl_run))
    _, estimates = differences_of(rl, sft)
    differences = {
        name: {"mean": estimates[name]["value"], "ci95": [estimates[name]["low"], estimates[name]["high"]]}
        for name in ("reward", "accuracy")
    }
    short = lambda e: {n: e.summary["metrics"][n]["value"] for n in ("reward", "accuracy")}  # noqa: E731
    both = {"sft": sft.summary["metrics"], "grpo": rl.summary["metrics"]}
    return {
        "sft": short(sft),
        "grpo": short(rl),
        "difference_ci95": differences["reward"]["ci95"],
        "difference": differences,
        "metrics": {n: {k: m[n] for k, m in both.items()} for n in _shown(rl.summary)},
    }


def _shown(summary: dict[str, Any]) -> list[str]:
    levels = [n for n in summary["metrics"] if n.startswith("accuracy/") and "distance" not in n]
    return [n for n in (*SHOWN[:2], *levels, *SHOWN[2:]) if n in summary["metrics"]]


def vlmrl(*arguments: Any, say: Callable[[str], None]) -> dict[str, Any]:
    """Run one command in a process, as a user would type it, and print it. Return its JSON; {} if it prints no JSON."""
    words: Sequence[str] = [str(a) for a in arguments]
    say("     $ vlmrl " + " ".join(words))
    command = [sys.executable, "-c", "from vlmrl.cli.app import main; main()", *words]
    # A model this small is faster on one thread than on two: 0.40 s against 0.61 s per step of SFT, 1.2 s against 1.6 s
    # per step of GRPO, on two cores.
    environment = {"OMP_NUM_THREADS": "1"} | dict(os.environ)
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    if process.returncode:
        raise DemoError(f"`vlmrl {' '.join(words)}` ended with code {process.returncode}", hint="its output is above")
    last = process.stdout.strip().splitlines()[-1] if process.stdout.strip() else "{}"
    return json.loads(last) if last.startswith("{") else {}
