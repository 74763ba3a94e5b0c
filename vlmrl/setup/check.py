"""`vlmrl check`: all problems of recipe, data and machine in one report, and the plan of a run.

`vlmrl train`, `vlmrl sft` and `vlmrl try` run `quick_look` and then `check_model` before they begin; `vlmrl check` runs
`preflight`, which makes all checks. The first is whether the model exists: this file imports little, so that it is
fast. Services of rewards are asked once each, before anything else is spent. The code of a user's logger is not run.
Missing GPU kernels are listed with their commands and the cost without them.
"""

from __future__ import annotations

import ast
import importlib.util
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmrl.errors import Problem, VlmrlError, did_you_mean, install_line, problems_in
from vlmrl.loggers import BUILTIN, file_and_class, short_name
from vlmrl.model.memory import LINEAR_KEPT
from vlmrl.model.model_files import folder_problems, require_source
from vlmrl.recipe.checks import check_recipe
from vlmrl.recipe.load import LoadedRecipe
from vlmrl.recipe.rules.engine import check_engine, check_world
from vlmrl.recipe.toml_lines import AUTO_ORIGIN
from vlmrl.rewards.base import NO_PLACE, ServicePlace, accuracy_part, other_choices, value_bounds
from vlmrl.rewards.service_pool import opened
from vlmrl.setup import machine, prompt_lengths, rows
from vlmrl.setup.catalogs import catalogs
from vlmrl.setup.environment_check import check_environment, environment_plan
from vlmrl.setup.memory_fit import HERE, Target, check_device, check_memory, find_cluster, plan_memory
from vlmrl.setup.memory_sizes import PromptLengths
from vlmrl.setup.prompt_lengths import estimate_prompts, longest_allowed
from vlmrl.setup.prompts import PromptScan, told_answers, truth_form
from vlmrl.setup.rows import check_boxes, check_native_box_space, check_validation

if TYPE_CHECKING:
    from vlmrl.data.encode import Encoder
    from vlmrl.model.model_facts import ModelFacts
    from vlmrl.tasks.source import Source


def place_of_check(runs_folder: Path) -> ServicePlace:
    """Return the place of a check's services. Each check has a budget of its own."""
    return ServicePlace(str(runs_folder), f"check {time.time_ns()}")


def check_services(
    loaded: LoadedRecipe, sources: Sequence[Source], place: ServicePlace
) -> tuple[list[Problem], dict[str, Mapping[str, Any]]]:
    """Send one request to each service of the sources' rewards.

    Returns: (problems, reward -> facts about the answer, see `Service.try_out`).
    """
    problems: list[Problem] = []
    facts: dict[str, Mapping[str, Any]] = {}
    seen: list[Any] = []
    for single in (single for source in sources for single in source.reward.singles):
        if single.service is None or dict(single.service.args) in seen:
            continue
        seen.append(dict(single.service.args))
        try:
            with opened(single.service, place) as service:
                facts[_label(single.name, facts)] = dict(service.try_out())
        except VlmrlError as error:
            at = f" ({error.where})" if error.where else ""
            where = loaded.where(("judge", "endpoint"), ("judge", "model"), ("reward", "name"))
            problems.append(Problem(f"reward `{single.name}`: {error.message}{at}", where, error.hint))
    return problems, facts


def _label(name: str, taken: Mapping[str, Any]) -> str:
    number = 1 + sum(label.partition(" ")[0] == name for label in taken)
    return name if number == 1 else f"{name} {number}"


METHODS = ("open", "log", "samples", "close")
FOR_SERVICES = ("project", "entity", "group", "name")
UNFIT = re.compile(r"[/\\#?%:]")
"""Characters that the project name of a service cannot contain."""
MAX_CHARS = 128


def check_loggers(loaded: LoadedRecipe) -> list[Problem]:
    """Return every problem of `[log]` that can be found before a run."""
    return [*_sinks(loaded), *_names(loaded)]


def _sinks(loaded: LoadedRecipe) -> Iterator[Problem]:
    where, seen = loaded.where(("log", "sinks")), set[str]()
    for sink in loaded.recipe.log.sinks:
        name, own = short_name(sink), file_and_class(sink)
        if name in seen:
            yield Problem(f"`log.sinks` has two loggers called {name}", where, "name each once")
        seen.add(name)
        if own is not None:
            yield from _own_class(loaded, *own)
        elif sink not in BUILTIN:
            listing = f"loggers: {', '.join(BUILTIN)}; or a class of your own as path/to/file.py:Class"
            message = f"`log.sinks` names `{sink}`, and there is no such logger"
            yield Problem(message, where, did_you_mean(sink, BUILTIN, listing))
        elif not is_installed(sink):
            hint = f"in the checkout of vlmrl: pip install '.[{sink}]'; or leave it out of log.sinks"
            yield Problem(f"the logger {sink} needs {sink}, which is not installed", where, hint)


def is_installed(package: str) -> bool:
    """Return whether a package can be imported. A folder with its name, such as wandb's own files, does not count."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _own_class(loaded: LoadedRecipe, file: str, class_name: str) -> Iterator[Problem]:
    where, path = loaded.where(("log", "sinks")), Path(file)
    if not path.is_file():
        yield Problem(f"`log.sinks` names a file that does not exist: {file}", where)
        return
    try:
        tree = ast.parse(path.read_bytes(), filename=file)
    except SyntaxError as error:
        yield Problem(f"the logger's file is not valid Python: {error.msg}", f"{file}:{error.lineno or 1}")
        return
    except (OSError, ValueError, RecursionError) as error:
        yield Problem(f"cannot read the logger's file: {error}", file)
        return
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if class_name not in classes:
        listing = f"{file} defines: {', '.join(classes) or 'no class'}"
        yield Problem(f"{file} has no class `{class_name}`", where, listing)
        return
    node = classes[class_name]
    has = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
    missing = [name for name in METHODS if name not in has]
    if missing and not node.bases:
        hint = f"a logger has the methods {', '.join(METHODS)} (vlmrl/loggers/base.py)"
        yield Problem(f"`{class_name}` has no method `{missing[0]}`", f"{file}:{node.lineno}", hint)


def _names(loaded: LoadedRecipe) -> Iterator[Problem]:
    log = loaded.recipe.log
    services = [sink for sink in log.sinks if sink != "tensorboard"]
    for key in FOR_SERVICES:
        value, where = getattr(log, key), loaded.where(("log", key))
        if value is None:
            continue
        if not services:
            hint = 'log.sinks = ["wandb"] or ["trackio"], or leave it out'
            yield Problem(f"`log.{key}` does nothing: no logger of log.sinks uses it", where, hint, "warning")
        if len(value) > MAX_CHARS or not value.isprintable():
            yield Problem(
                f"`log.{key}` has more than {MAX_CHARS} characters, or characters that cannot be displayed", where
            )
        elif key == "project" and UNFIT.search(value):
            yield Problem(f"`log.project` cannot be `{value}`", where, "leave out / \\ # ? % and :")


PLAIN_ATTENTION = "PyTorch's scaled_dot_product_attention"
FLASH_NAMES = {"fa3": "FlashAttention 3", "fa4": "flash-attn-4"}
"""Value of `model.attention` -> name in words."""


def check_kernels(loaded: LoadedRecipe, facts: ModelFacts, target: Target = HERE) -> list[Problem]:
    """Warn of kernels that this model's layers would use on a GPU and that are not installed."""
    if find_cluster(loaded, target).gpu is None or target.is_elsewhere:
        return []
    linear = list(facts.text.get("layer_types") or []).count("linear_attention")
    where, problems = loaded.where(("model", "path")), []
    if linear and importlib.util.find_spec("fla") is None:
        times = LINEAR_KEPT["torch"][0] / LINEAR_KEPT["fla"][0]
        message = (
            f"flash-linear-attention is not installed: {linear} of {facts.layers} layers compute their recurrence in "
            f"plain PyTorch, in many small kernels, and keep about {times:.0f} times as many activations"
        )
        problems.append(Problem(message, where, install_line("flash-linear-attention"), "warning"))
    if linear and importlib.util.find_spec("causal_conv1d") is None:
        message = f"causal-conv1d is not installed: the convolutions of {linear} layers run in plain PyTorch, slower"
        problems.append(Problem(message, where, install_line("causal-conv1d"), "warning"))
    return problems


def attention_kernel(loaded: LoadedRecipe, facts: ModelFacts, target: Target = HERE) -> dict[str, Any] | None:
    """Return the kernel that computes attention in training on this machine's GPU; None if there is no GPU.

    If flash-attn is missing, there is no warning, because PyTorch has a similar kernel.

    Returns: `text` and `images`: the kernels of the language model and of the vision tower in words; `missing`: how to
        install flash-attn if this run would use it, else None; `unused`: values of `model.attention` that name
        installed kernels which this run could use.
    Raises: CheckpointError for a flash-attn that cannot be imported, and kernels of the recipe that are not installed.
    """
    if target.is_elsewhere or find_cluster(loaded, target).gpu is None:
        return None
    if facts.sharing == "padded":
        return {"text": PLAIN_ATTENTION, "images": PLAIN_ATTENTION, "missing": None, "unused": []}
    from vlmrl.model.attention import KERNELS, flash_attn, has_kernels, require_kernels

    chosen = loaded.recipe.model.attention
    require_kernels(chosen)
    here = chosen in KERNELS or flash_attn() is not None
    varlen = FLASH_NAMES.get(chosen, "flash-attn" if here else "PyTorch's variable-length kernel")
    half = loaded.recipe.model.dtype != "float32"
    rows = varlen if facts.by_flash(loaded.recipe.model.dtype) else "FlexAttention"
    text = rows if facts.sharing == "packed" else PLAIN_ATTENTION
    images = varlen if half and facts.has_axes else PLAIN_ATTENTION
    flashes = varlen in (text, images)
    missing = install_line("flash-attn") if flashes and not here else None
    unused = [name for name in KERNELS if flashes and chosen == "auto" and has_kernels(name)]
    return {"text": text, "images": images, "missing": missing, "unused": unused}


def check_location(loaded: LoadedRecipe, model_files: str | None = None) -> list[Problem]:
    """Return a problem if the model's folder, its name on the hub, or some of its files are missing.

    This takes at most a second, except for a hub name that is not in the cache. Nothing of torch is imported.

    Args:
        model_files: see `preflight`.
    """
    model = loaded.recipe.model
    folder = Path(model_files or model.path).expanduser()
    if folder.is_dir():
        elsewhere = model_files is not None and model_files != model.path
        return folder_problems(folder, has_weights=not elsewhere, own_code=model.trust_remote_code)
    try:
        require_source(model_files or model.path, model.revision)
    except VlmrlError as error:
        return [Problem(error.message, error.where or loaded.where(("model", "path")), error.hint)]
    return []


def check_reveal(loaded: LoadedRecipe, entries: Sequence[rows.Entry]) -> list[Problem]:
    """Return a problem if the text that the teacher alone reads cannot be rendered for some of the first rows."""
    from vlmrl.tasks.prompt import render_revealed

    settings = loaded.recipe.teacher
    if settings is None or settings.reveal is None:
        return []
    try:
        for source in (entry.train for entry in entries):
            for i in range(min(len(source.rows), rows.QUICK_ROWS)):
                render_revealed(settings.reveal, source.rows[i], source.task.variables, hides=settings.control)
    except VlmrlError as error:
        at, row = loaded.where(("teacher", "reveal")), (error.where or "").partition(", ")[2]
        return [Problem(f"{error.message}{f' ({row})' if row else ''}", at, error.hint)]
    return []


def check_teacher(loaded: LoadedRecipe, encoder: Encoder, runs_folder: Path | None) -> list[Problem]:
    """Return a problem if the teacher does not exist, or does not have the model's tokenizer. No weights are read.

    Args:
        runs_folder: folder of the runs, one of which may be the teacher; None = the working folder.
    """
    if (settings := loaded.recipe.teacher_model) is None:
        return []
    from vlmrl.model.load import load_processor, require_same_tokenizer
    from vlmrl.model.model_facts import model_facts
    from vlmrl.setup.model_origin import find_model

    try:
        files = find_model(settings.path, runs_folder or Path()).files
        require_same_tokenizer(encoder.tokenizer, load_processor(settings, path=files).tokenizer, settings.path)
        model_facts(settings, path=files)
    except VlmrlError as error:
        at = loaded.where(("teacher", "path"))
        return [Problem(p.message, at, p.hint) for p in problems_in(error)]
    return []


QUICK_PROMPTS = 4


@dataclass
class Preflight:
    """Result of all checks.

    Args:
        problems: errors and warnings, in the order they were found.
        plan: section -> name -> JSON value: numbers of the run and its needs. If a section could not be computed, it is
            absent, and a problem has the reason.
    """

    problems: list[Problem] = field(default_factory=list)
    plan: dict[str, Any] = field(default_factory=dict)

    @property
    def errors(self) -> list[Problem]:
        return [p for p in self.problems if p.level == "error"]

    def add(self, problems: Sequence[Problem]) -> None:
        """Add problems, except where an error at the same place or with the same message is there already."""
        known = self.errors
        self.problems += [p for p in problems if not any(p.message == e.message or p.where == e.where for e in known)]


def quick_look(loaded: LoadedRecipe, services_in: Path | None = None) -> tuple[list[Problem], PromptLengths | None]:
    """Run the checks that take a second or two: rules, names, files, opening the data, some rows and prompts of each.

    If the recipe itself has errors, no data are opened.

    Returns: (errors and warnings, estimated length of the longest prompt of a few rows). The estimate needs no
        tokenizer; None = not known.

    Args:
        services_in: folder of the runs: the services that the rewards ask are tried, too; None = they are not asked.
    """
    problems = check_recipe(loaded, catalogs()) + machine.check_installed(loaded) + check_loggers(loaded)
    if any(p.level == "error" for p in problems):
        return problems, None
    opened = rows.open_sources(loaded)
    problems += opened.problems
    for where, source in ((entry.where, entry.train) for entry in opened.entries):
        scan = rows.scan_rows(source, where, limit=rows.QUICK_ROWS, prompts=PromptScan(source))
        problems += scan.problems + rows.check_pictured(loaded, source, scan, where)
        problems += rows.check_images(source, where, rows=QUICK_PROMPTS)
        if loaded.recipe.kind == "sft":
            problems += rows.check_traces(source, where, rows=QUICK_PROMPTS)
    problems += check_validation(loaded, opened)
    problems += _check_demonstrations(loaded, opened.entries, services_in)[0]
    problems += check_reveal(loaded, opened.entries)
    sound = not any(p.level == "error" for p in problems)
    if sound and services_in is not None:
        place = place_of_check(services_in)
        problems += check_services(loaded, [entry.train for entry in opened.entries], place)[0]
    return problems, estimate_prompts(loaded, [entry.train for entry in opened.entries]) if sound else None


def check_model(
    loaded: LoadedRecipe,
    model_files: str | None = None,
    runs_folder: Path | None = None,
    *,
    target: Target = HERE,
    prompts: PromptLengths | None = None,
) -> list[Problem]:
    """Check the recipe's keys about the model (parts, layers, images) against its configuration. No weights are read.

    `preflight` includes these checks.

    Args:
        model_files: see `preflight`.
        runs_folder: folder in which a run will follow: its disk space is checked, too; None = no run follows.
        prompts: lengths of the prompts: if given, memory is checked, too; None = not known.
    """
    recipe = loaded.recipe
    problems = check_location(loaded, model_files)
    if problems:
        return problems
    from vlmrl.model.model_facts import model_facts

    try:
        vllm = recipe.rollout.engine == "vllm"
        if recipe.lora is not None or recipe.model.freeze or vllm or runs_folder is not None:
            facts = model_facts(recipe.model, path=model_files)
            problems += machine.check_trained(loaded, facts) + machine.check_served(loaded, facts)
            if loaded.origins.get("rollout.engine", "").startswith(AUTO_ORIGIN):  # chosen after the recipe's checks
                problems += check_engine(loaded)
            problems += _check_world(loaded, target)
            if runs_folder is not None and not problems:
                problems += machine.check_disk(loaded, runs_folder, facts)[0]
                if prompts is not None:
                    problems += check_positions(loaded, facts, prompts) if recipe.kind == "rl" else []
                    problems += check_memory(loaded, plan_memory(loaded, facts, target, prompts))
                problems += check_kernels(loaded, facts)
        encoder = prompt_lengths.make_encoder(loaded, model_files)
        problems += prompt_lengths.check_pixels(loaded, encoder) + check_teacher(loaded, encoder, runs_folder)
    except VlmrlError as error:
        problems += problems_in(error, loaded.where(("model", "path")))
    return problems


def preflight(
    loaded: LoadedRecipe,
    *,
    runs_folder: Path,
    model_files: str | None = None,
    target: Target = HERE,
    missing: Sequence[Problem] = (),
) -> Preflight:
    """Check everything. This takes seconds to minutes: every row is read once, and the model's processor is loaded.

    Args:
        model_files: folder of the model's configuration and processor if `model.path` names a run or checkpoint.
        missing: problems if the model does not exist (from `check_location` or the run store); it is then not read.
    """
    at_model = loaded.where(("model", "path"))
    installed = [] if target.is_elsewhere else machine.check_installed(loaded) + check_loggers(loaded)
    result = Preflight(check_recipe(loaded, catalogs()) + installed + _check_world(loaded, target))
    if missing:  # `missing` is more precise than "no such folder", such as for a run without checkpoints
        result.problems = [p for p in result.problems if p.where != at_model]
    elif not any(p.level == "error" and p.where == at_model for p in result.problems):
        missing = check_location(loaded, model_files)
    has_model = not missing and not any(p.level == "error" and p.where == at_model for p in result.problems)
    result.problems = [*missing, *result.problems]
    opened = rows.open_sources(loaded, result.problems)
    result.add(opened.problems)
    result.problems += check_validation(loaded, opened)
    problems, numbers = _check_demonstrations(loaded, opened.entries, runs_folder)
    result.add([*problems, *check_reveal(loaded, opened.entries)])
    result.plan |= {"demonstrations": numbers} if numbers else {}
    encoder = _open_encoder(result, loaded, model_files) if has_model else None
    place = place_of_check(runs_folder)
    unavailable, services = check_services(loaded, [e.train for e in opened.entries if e.reward_ok], place)
    result.problems += [replace(p, level="warning") for p in unavailable] if target.is_elsewhere else unavailable
    result.plan |= {"services": services} if services else {}
    service_place = None if unavailable else place
    measurable = [entry for entry in opened.entries if _check_entry(result, loaded, entry, encoder, service_place)]
    for entry in measurable:
        problems, facts = check_boxes(entry.train, encoder, entry.where, runs_folder)
        result.add(problems)
        result.plan |= {"boxes": {**result.plan.get("boxes", {}), entry.train.name: facts}} if facts else {}
    longest = None if encoder is None else _check_tokens(result, loaded, measurable, encoder)
    sources = [(e.train.name, e.train.share, len(e.train.rows)) for e in opened.entries]
    validation = [len(s.rows) for e in opened.entries for s in (e.validation, *e.others) if s is not None]
    limit = loaded.recipe.eval.max_rows
    samples = sum(setting.samples for setting in loaded.recipe.eval.named_settings.values())
    if loaded.recipe.train.steps:  # 0: the number of steps is not known yet
        result.plan["run"] = machine.arithmetic(loaded, sources, samples * sum(min(n, limit or n) for n in validation))
    if has_model:
        _check_machine(result, loaded, runs_folder, model_files, longest, target)
        is_run = model_files not in (None, loaded.recipe.model.path)  # the model of a run may have learned any space
        for entry in opened.entries if "model" in result.plan and not is_run else ():
            result.problems += check_native_box_space(loaded, entry.train, result.plan["model"]["type"], entry.where)
        result.add(check_teacher(loaded, encoder, runs_folder) if encoder is not None else [])
    return result


def _check_demonstrations(
    loaded: LoadedRecipe, entries: Sequence[rows.Entry], runs_folder: Path | None
) -> tuple[list[Problem], dict[str, str]]:
    """Check the demonstrations of sources that could all be opened, as `check_demonstrations` does."""
    from vlmrl.setup.demonstrations import check_demonstrations

    whole = len(entries) == len(loaded.recipe.data)
    sources = {i: entry.train for i, entry in enumerate(entries)} if whole else {}
    return check_demonstrations(loaded, sources, runs_folder or Path("runs"))


def _open_encoder(result: Preflight, loaded: LoadedRecipe, model_files: str | None) -> Encoder | None:
    """Return the encoder of the model, and report pixel bounds that its processor ignores.

    If the encoder cannot be made, report a problem and return None.
    """
    try:
        encoder = prompt_lengths.make_encoder(loaded, model_files)
    except VlmrlError as error:
        result.add(problems_in(error, loaded.where(("model", "path"))))
        return None
    result.problems += prompt_lengths.check_pixels(loaded, encoder) + prompt_lengths.check_embeddings(
        loaded, encoder, model_files
    )
    return encoder


def _check_entry(
    result: Preflight, loaded: LoadedRecipe, entry: rows.Entry, encoder: Encoder | None, place: ServicePlace | None
) -> bool:
    """Check one source, except the lengths of its prompts. Return whether these can be measured.

    Args:
        place: where services keep their files; None = they do not answer, and rewards that ask one are not tried.
    """
    source, where = entry.train, entry.where
    learns = loaded.recipe.kind == "sft"
    prompts = PromptScan(source, encoder, learns)
    scan = rows.scan_rows(source, where, prompts=prompts)
    result.problems += scan.problems + rows.check_pictured(loaded, source, scan, where)
    others = {split: source.with_split(split) for split in source.dataset.splits if split != source.split}
    for name, other in (("validation", entry.validation), *((one.split, one) for one in entry.others)):
        # A split of the same dataset is there already, unless it is the training split itself.
        if other is not None and (other.dataset.path != source.dataset.path or other.split not in others):
            others[name] = other
    splits: dict[str, Any] = {}
    for split, other_source in others.items():
        same = prompts.is_sound  # if not, the same template would fail again
        other = rows.scan_rows(other_source, where, prompts=PromptScan(other_source, encoder) if same else None)
        result.problems += other.problems
        result.problems += rows.check_overlap(source.name, split, scan, other, where)
        splits[split] = {"rows": other.rows, "images": len(other.images)}
    result.problems += rows.check_images(source, where)
    if learns and (prompts.is_sound or source.task.trace is None):
        result.problems += rows.check_traces(source, where)
    sound = not any(p.level == "error" for p in scan.problems)
    sound = sound and entry.reward_ok and (place is not None or not any(r.service for r in source.reward.singles))
    reward = rows.check_reward(loaded, source, where, place or NO_PLACE) if sound else rows.RewardFacts()
    result.problems += reward.problems
    if prompts.is_sound:
        sampled = rows.sample_rows(source, rows.SAMPLE_ROWS)
        result.problems += check_environment(source, where, sampled, learns=learns)
    if encoder is not None and reward.response:
        result.problems += prompt_lengths.check_room(loaded, source, encoder, reward.response)
    if prompts.is_sound:
        result.problems += told_answers(source, rows.sample_rows(source, rows.SAMPLE_ROWS), where)
    if note := other_choices(reward.parts, source.reward) if reward.parts and not _measures(source) else "":
        result.problems.append(
            Problem(f"`{source.name}`: {note}", loaded.where(("reward",), ("rewards",)), None, "warning")
        )
    result.plan.setdefault("data", {})[source.name] = {
        "path": source.dataset.path,
        "task": source.task.name,
        "variant": source.task.variant or None,
        "split": source.split,
        "rows": scan.rows,
        "rows_read": scan.seen,
        "images": len(scan.images),
        "other_splits": splits,
        "prompt": source.template_path if source.template else "the table's own messages",
        "truth": truth_form(source.rows[0]) if scan.seen and not scan.problems else None,
        **environment_plan(source),
    }
    if entry.reward_ok:
        result.plan.setdefault("reward", {})[source.name] = _reward_plan(source, reward, loaded.recipe.reward.profile)
    return not prompts.stopped


def _reward_plan(source: Source, reward: rows.RewardFacts, profile: str) -> dict[str, Any]:
    # Without weights, the part `reward` is the score if it exists, else the sum of all parts is (rewards/scoring.py).
    unweighted = {"reward": 1.0} if "reward" in reward.parts else dict.fromkeys(reward.parts, 1.0)
    own = source.task.profile(profile)[0] if source.task.has_profile(profile) else None
    largest = value_bounds(source.reward, source.weights)[1]
    return {
        "name": source.reward.name,
        "profile": profile if source.reward.name == own else None,
        "weights": dict(source.weights) or unweighted,
        "parts": reward.parts,
        "largest": largest if math.isfinite(largest) else None,
        "accuracy": _accuracy(source, reward.parts),
        "correct_response": reward.correct,
        "empty_response": reward.empty,
    }


def _measures(source: Source) -> bool:
    """Return whether the task itself measures the accuracy."""
    return "accuracy" in source.task.measured(source.rows[0].truth)


def _accuracy(source: Source, parts: Sequence[str]) -> str | None:
    """Describe what the metric `accuracy` of a source measures; None if it has none, judged by the parts in `parts`."""
    if _measures(source) and not source.reward.accuracy_named:
        return f"measured by the task `{source.task.name}`"
    part = accuracy_part(parts, source.reward)
    return None if part is None else f"the part `{part}`"


def _check_tokens(
    result: Preflight, loaded: LoadedRecipe, entries: Sequence[rows.Entry], encoder: Encoder
) -> PromptLengths | None:
    """Measure prompts with the model's processor. Return the longest lengths; None if no row could be measured."""
    longest = images = traces = 0
    for where, source in ((entry.where, entry.train) for entry in entries):
        facts = prompt_lengths.measure_tokens(loaded, source, encoder, where)
        result.add(facts.failures)
        result.problems += facts.problems
        if facts.prompt_tokens:
            longest, images = max(longest, *facts.prompt_tokens), max(images, *facts.image_tokens)
            traces = max(traces, *(whole for whole, _ in facts.trace_tokens), 0)
            result.plan.setdefault("prompts", {})[source.name] = _token_plan(facts)
    is_known = loaded.recipe.kind == "sft" and traces and not loaded.recipe.has_episodes
    response = traces if is_known else loaded.recipe.longest_response
    return PromptLengths(longest, images, response) if longest else None


def _token_plan(facts: prompt_lengths.TokenFacts) -> Mapping[str, Any]:
    n = len(facts.prompt_tokens)
    sizes = sorted({seen for _, seen in facts.images})
    return {
        "sampled_rows": n,
        "tokens_mean": sum(facts.prompt_tokens) / n,
        "tokens_max": max(facts.prompt_tokens),
        "image_tokens_mean": sum(facts.image_tokens) / n,
        "histogram": prompt_lengths.histogram(facts.prompt_tokens),
        "correct_response_tokens_max": max((whole for whole, _ in facts.trace_tokens), default=None),
        "images": len(facts.images),
        "images_enlarged": facts.enlarged,
        "images_shrunk": facts.shrunk,
        "image_sizes": [f"{w} x {h}" for w, h in (sizes if len(sizes) <= 4 else [sizes[0], sizes[-1]])],
    }


def _check_machine(
    result: Preflight,
    loaded: LoadedRecipe,
    runs_folder: Path,
    model_files: str | None,
    longest: PromptLengths | None,
    target: Target,
) -> None:
    """Check the model, the memory and the disk of the machine.

    Args:
        longest: result of `_check_tokens`. If None, memory is planned for the longest prompt that the recipe allows.
            A lack of memory is then not reported, because the real prompts may be shorter.
    """
    from vlmrl.model.model_facts import model_facts

    try:
        facts = model_facts(loaded.recipe.model, path=model_files)
    except VlmrlError as error:
        result.add(problems_in(error, loaded.where(("model", "path"))))
        return
    device = "cuda" if target.is_elsewhere else None
    problems = machine.check_trained(loaded, facts) + machine.check_served(loaded, facts, device)
    if problems:
        result.add(problems)
        return
    trained = machine.trained_parameters(loaded, facts)
    parts = dict(facts.parameters)
    result.plan["model"] = {"type": facts.model_type, "parameters": facts.total, "trained": trained, "parts": parts}
    result.problems += check_device(loaded, target)
    memory = plan_memory(loaded, facts, target, longest or longest_allowed(loaded))
    result.problems += (check_memory(loaded, memory) if longest else []) + check_kernels(loaded, facts, target)
    try:
        attention = attention_kernel(loaded, facts, target)
    except VlmrlError as error:
        result.problems += problems_in(error, loaded.where(("model", "path")))
    else:
        result.plan |= {"attention": attention} if attention else {}
    result.plan["memory"] = memory.as_dict() | {"measured_prompts": longest is not None}
    problems, disk = machine.check_disk(loaded, runs_folder, facts)
    result.problems += [] if target.is_elsewhere else problems
    result.plan["disk"] = disk
    result.problems += check_positions(loaded, facts, longest) if longest else []


def check_positions(loaded: LoadedRecipe, facts: ModelFacts, longest: PromptLengths) -> list[Problem]:
    """Check that the model has positions for the longest prompt and response."""
    limit, recipe = int(facts.text.get("max_position_embeddings") or 0), loaded.recipe
    needed = longest.tokens + (recipe.longest_response if recipe.kind == "rl" else longest.response)
    if not limit or needed <= limit:
        return []
    key = "environment.tokens" if recipe.has_episodes else "rollout.max_new_tokens"
    message = f"prompt and response may have {needed} tokens; this model accepts {limit}"
    hint = f"lower {key}, or rollout.max_prompt_tokens and model.max_pixels"
    return [Problem(message, loaded.where(tuple(key.split(".")), ("model", "path")), hint)]


def _check_world(loaded: LoadedRecipe, target: Target) -> list[Problem]:
    return [Problem(u.message, loaded.where(u.key), u.hint) for u in check_world(loaded.recipe, target.processes)]
