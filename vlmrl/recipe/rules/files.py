"""Rules about the files that a recipe names, and about its lists of rewards, `[[rewards]]` and `[[data.rewards]]`.

Files must exist and have the right kind. Nothing is imported or run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from vlmrl.errors import Problem, RecipeError, did_you_mean, nearest
from vlmrl.recipe.key_fields import split_file
from vlmrl.recipe.load import LoadedRecipe
from vlmrl.recipe.schema import NO_ENVIRONMENT, Data, Reward
from vlmrl.recipe.tables import OF_ONE_REWARD, OF_TASK, ListedReward
from vlmrl.recipe.template import read_template
from vlmrl.recipe.toml_lines import Key, dotted
from vlmrl.rewards.several import faults, label_from, label_of

TABLE_ENDINGS = (".parquet", ".jsonl", ".json", ".csv")
"""File name endings of tables."""
MAX_SOURCE_BYTES = 4 << 20
"""Maximum size of a reward's or task's source file, in bytes."""
TINY_MODEL = "demo/model"
"""Path of the tiny model in shipped recipes; `vlmrl demo --model-only` makes it."""

_HUB_NAME = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


def is_file_reward(name: str) -> bool:
    """Return whether a reward is given as `path/to/file.py:function`, not as the name of a built-in reward."""
    return ".py" in name or "/" in name or ":" in name


def _data_paths(loaded: LoadedRecipe) -> Iterator[Problem]:
    for i, data in enumerate(loaded.recipe.data):
        key: Key = ("data", i, "path")
        if data.path.startswith("hub:"):
            if not data.path.removeprefix("hub:").partition("#")[0].strip("/"):
                yield Problem(
                    f"`{dotted(key)}` names no dataset after `hub:`", loaded.where(key), 'path = "hub:org/name"'
                )
            continue
        path = Path(data.path)
        if not path.exists():
            yield _missing(loaded, key, data.path, _how_to_make(loaded, data, key) if data.task != "table" else None)
        elif path.is_dir() and not _is_dataset_folder(path):
            hint = "make it with `vlmrl prep`, or name a table file or a folder of them"
            message = f"the folder {path} has no dataset.json and no table, so it is not a dataset"
            yield Problem(message, loaded.where(key), hint)
        elif path.is_file() and path.suffix.lower() not in TABLE_ENDINGS:
            hint = f"a table ends in {', '.join(TABLE_ENDINGS)}"
            yield Problem(f"`{dotted(key)}` is {path}: this kind of table cannot be read", loaded.where(key), hint)


def _how_to_make(loaded: LoadedRecipe, data: Data, key: Key) -> str:
    """Return a hint with the command that makes a task's dataset: that after `First:` in the recipe.

    Else it is that in the file that names the path, else the command with the task's defaults.
    """
    place = loaded.places.get(key)
    text = loaded.text + (place.file.read_text("utf-8", "replace") if place and place.file else "")
    first = re.search(rf"First: (vlmrl prep {re.escape(data.task)}(?: [^\s(]*[^\s(,])*)", text)
    out = f" --out {data.path}" if Path(data.path) != Path("data") / data.task else ""
    return f"make it first: `{first[1] if first else f'vlmrl prep {data.task}{out}'}`"


def _is_dataset_folder(path: Path) -> bool:
    """Return whether a folder was prepared by `vlmrl prep`, saved by the datasets library, or contains tables."""
    marks = ("dataset.json", "dataset_info.json", "dataset_dict.json")
    return any((path / name).is_file() for name in marks) or any(
        file.suffix.lower() in TABLE_ENDINGS for file in path.rglob("*")
    )


def _validation_files(loaded: LoadedRecipe) -> Iterator[Problem]:
    for i, data in enumerate(loaded.recipe.data):
        for key, value in (("validation", data.validation), ("demonstrations", data.demonstrations)):
            if (
                isinstance(value, str)
                and value
                and (Path(value).suffix.lower() in TABLE_ENDINGS or "/" in value)
                and not Path(value).exists()
            ):
                yield _missing(loaded, ("data", i, key), value)


def _images_roots(loaded: LoadedRecipe) -> Iterator[Problem]:
    for i, data in enumerate(loaded.recipe.data):
        key: Key = ("data", i, "images_root")
        if data.images_root and not Path(data.images_root).exists():
            yield _missing(loaded, key, data.images_root)
        elif data.images_root and not Path(data.images_root).is_dir():
            yield Problem(f"`{dotted(key)}` is {data.images_root}, which is not a folder", loaded.where(key))


def _prompts(loaded: LoadedRecipe) -> Iterator[Problem]:
    for i, data in enumerate(loaded.recipe.data):
        key: Key = ("data", i, "prompt")
        if not data.prompt:
            continue
        path = Path(data.prompt)
        if not path.is_file():
            yield _missing(loaded, key, data.prompt, "`data.prompt` names a Jinja file; write the text into one")
            continue
        try:
            read_template(path)
        except RecipeError as error:
            yield Problem(error.message, error.where, error.hint)


def _rewards(loaded: LoadedRecipe) -> Iterator[Problem]:
    for key, name in named_rewards(loaded):
        if is_file_reward(name) and (problem := _reward_problem(loaded, key, name)):
            yield problem


def named_rewards(loaded: LoadedRecipe) -> Iterator[tuple[Key, str]]:
    """Yield (key, name) of every reward that a recipe names, except for the task's own in a list."""
    recipe = loaded.recipe
    of_sources = [(("data", i), data) for i, data in enumerate(recipe.data)]
    singles: list[tuple[Key, str | None]] = [((*key, "reward"), data.reward) for key, data in of_sources]
    lists: list[tuple[Key, list[ListedReward]]] = [((*key, "rewards"), data.rewards) for key, data in of_sources]
    for key, name in [*singles, (("reward", "name"), recipe.reward.name)]:
        if name:
            yield key, name
    for key, rewards in [*lists, (("rewards",), recipe.rewards)]:
        for i, one in enumerate(rewards):
            if one.name != OF_TASK:
                yield (*key, i, "name"), one.name


def blames_reward(loaded: LoadedRecipe, problems: Sequence[Problem]) -> bool:
    """Return whether an error among these is about a reward that the recipe names or lacks, or about its profile."""
    places = {loaded.where(key) for key in (*(key for key, _ in named_rewards(loaded)), ("reward", "profile"))}
    places |= {loaded.where(("data", i, "task"), ("data", i)) for i in range(len(loaded.recipe.data))}
    in_files = list(_rewards(loaded))
    return any(p.level == "error" and (p.where in places or p in in_files) for p in problems)


def _tasks(loaded: LoadedRecipe) -> Iterator[Problem]:
    """Find files of users' tasks that are missing, are not Python, or lack the function. The files are not run."""
    for i, data in enumerate(loaded.recipe.data):
        if is_file_reward(data.task) and (problem := _function_problem(loaded, ("data", i, "task"), data.task, "task")):
            yield problem


def _environments(loaded: LoadedRecipe) -> Iterator[Problem]:
    """Find files of environments that are missing, are not Python, or lack the name. The files are not run.

    `:NAME` is a name in the file of the task, which is known when the data are opened.
    """
    named: list[tuple[Key, str | None]] = [(("environment", "name"), loaded.recipe.environment.name)]
    named += [(("data", i, "environment"), data.environment) for i, data in enumerate(loaded.recipe.data)]
    for key, name in named:
        if not name or name == NO_ENVIRONMENT or name.startswith(":"):
            continue
        if problem := _function_problem(loaded, key, name, "environment"):
            yield problem


def _reward_problem(loaded: LoadedRecipe, key: Key, name: str) -> Problem | None:
    problem = _function_problem(loaded, key, name, "reward")
    if problem is not None:
        return problem
    file, _, function = name.rpartition(":")
    tree = _parse_python(Path(file), "reward")
    names = {} if isinstance(tree, Problem) else _top_level_names(tree)
    table: Key = key[:-1] if key[-1] == "name" else ("reward",)
    return _args_problem(loaded, names.get(function), Path(file), function, table)


def _function_problem(loaded: LoadedRecipe, key: Key, name: str, what: str) -> Problem | None:
    """Return the problem of a `file.py:function`, found by reading its source.

    Args:
        what: "reward", "task" or "environment".
    """
    where = loaded.where(key)
    file, function = split_file(name)
    path = Path(file)
    if path.suffix != ".py":
        hint = f"a {what} is a built-in name (`vlmrl recipe list --{what}s`) or path/to/file.py:function"
        message = f"`{dotted(key)}` is `{name}`, which is neither a built-in nor file.py:function"
        if what == "environment":
            hint = "write path/to/file.py:NAME, or :NAME for a function, list, class or dict in the file of the task"
            message = f"`{dotted(key)}` is `{name}`, which names no file"
        return Problem(message, where, hint)
    if not path.is_file():
        return _missing(loaded, key, file, what=f"{'an' if what == 'environment' else 'a'} {what} file")
    tree = _parse_python(path, what)
    if isinstance(tree, Problem):
        return tree
    functions = _top_level_names(tree)
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    public_names = [n for n, node in functions.items() if (node is not None or n in classes) and not n.startswith("_")]
    listing = f"{path} defines: {', '.join(public_names) or 'no function'}"
    if not function:
        return Problem(
            f"`{dotted(key)}` names the file {path} but no function in it", where, f"add :function; {listing}"
        )
    if "*" not in functions and function not in functions:
        kind = "" if what == "environment" else "function "  # it may be a class, a list or a dict
        return Problem(f"{path} has no {kind}`{function}`", where, did_you_mean(function, public_names, listing))
    return None


def _parse_python(path: Path, what: str) -> ast.Module | Problem:
    try:
        if path.stat().st_size > MAX_SOURCE_BYTES:
            return Problem(f"the {what} file has more than {MAX_SOURCE_BYTES:,} bytes", str(path))
        return ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        return Problem(f"the {what} file is not valid Python: {error.msg}", f"{path}:{error.lineno or 1}")
    except (OSError, ValueError, RecursionError) as error:
        return Problem(f"cannot read the {what} file: {error}", str(path))


def _top_level_names(tree: ast.Module) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef | None]:
    """Return name -> function for the top-level names of a module. A class, value or import has None."""
    names: dict[str, ast.FunctionDef | ast.AsyncFunctionDef | None] = {}
    blocks = (ast.If, ast.Try, ast.With)  # names defined inside these statements are top-level names too
    nodes = [inner for node in tree.body for inner in (ast.walk(node) if isinstance(node, blocks) else (node,))]
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names[node.name] = node
        elif isinstance(node, ast.ClassDef):
            names[node.name] = None
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update(dict.fromkeys(alias.asname or alias.name.partition(".")[0] for alias in node.names))
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(dict.fromkeys(t.id for top in targets for t in ast.walk(top) if isinstance(t, ast.Name)))
    return names


def _args_problem(
    loaded: LoadedRecipe, node: ast.FunctionDef | ast.AsyncFunctionDef | None, path: Path, function: str, table: Key
) -> Problem | None:
    """Find a key of `args` that is not an argument of the function. `table`: the table with `args`."""
    if node is None or node.args.kwarg or node.decorator_list:
        return None
    arguments = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    settings: Any = loaded.recipe
    for part in table:
        settings = settings[part] if isinstance(part, int) else getattr(settings, part)
    for name in settings.args:
        if name not in arguments:
            hint = did_you_mean(name, arguments, f"{path}:{node.lineno} takes: {', '.join(arguments)}")
            return Problem(f"`{function}` has no argument `{name}`", loaded.where((*table, "args", name)), hint)
    return None


def _model(loaded: LoadedRecipe) -> Iterator[Problem]:
    """Find a local model folder that is missing or has no model. `vlmrl check` looks up hub names and runs."""
    teacher = loaded.recipe.teacher_model
    yield from _model_at(loaded, ("model", "path"), loaded.recipe.model.path)
    yield from () if teacher is None else _model_at(loaded, ("teacher", "path"), teacher.path)


def _model_at(loaded: LoadedRecipe, key: Key, value: str) -> Iterator[Problem]:
    path = Path(value).expanduser()
    first = Path(value).parts[0] if Path(value).parts else ""
    if path.is_dir():
        if not any((path / name).exists() for name in ("config.json", "manifest.json", "meta.json")):
            hint = "a model folder holds config.json, weights in .safetensors and the processor's files"
            hint += "" if "/" in value else f"; the run of this name is {value}@best"
            yield Problem(f"{path} holds no model: there is no config.json", loaded.where(key), hint)
    elif value == TINY_MODEL:
        data = loaded.recipe.data[0].path if loaded.recipe.data else "data/digits"
        yield _missing(loaded, key, value, f"make it first: `vlmrl demo --model-only {value} --data {data}`")
    elif path.is_file():
        hint = f'path = "{path.parent}"' if path.parent.name else None
        yield Problem(f"`{dotted(key)}` is the file {path}; it must be a folder", loaded.where(key), hint)
    elif value.count("/") > 1 or value.startswith((".", "/", "~")) or ("/" in value and Path(first).is_dir()):
        yield _missing(loaded, key, value)
    elif "/" in value and not _HUB_NAME.fullmatch(value):
        yield Problem(f"`{dotted(key)}` is `{value}`: neither a folder here nor a hub name", loaded.where(key))


def _missing(loaded: LoadedRecipe, key: Key, value: str, hint: str | None = None, what: str = "") -> Problem:
    """Return the problem of a path that does not exist, with the searched folders and a similar path in them."""
    places = loaded.paths_tried(key, value)
    nearby_paths = [str(p) for path in places if path.parent.is_dir() for p in _listing(path.parent) if p.exists()]
    nearest_path = nearest(str(places[0]), nearby_paths, cutoff=0.75)
    message = f"`{dotted(key)}` names {what or 'a path'} that does not exist: {' and '.join(str(p) for p in places)}"
    return Problem(message, loaded.where(key), f"did you mean {nearest_path}?" if nearest_path else hint)


def _listing(folder: Path) -> list[Path]:
    try:
        return list(islice(folder.iterdir(), 500))
    except OSError:
        return []


MADE_ELSEWHERE_RULES = (_model, _data_paths, _validation_files, _images_roots)
"""Rules about files that may be made later by other commands, or may be on another machine."""
FILE_RULES = (_model, _data_paths, _validation_files, _images_roots, _prompts, _tasks, _rewards, _environments)


Lists = list[tuple[Key, Sequence[ListedReward]]]


def reward_lists(loaded: LoadedRecipe) -> Lists:
    """Return (key, rewards) of every list of rewards in a recipe."""
    recipe = loaded.recipe
    own: Lists = [(("data", i, "rewards"), data.rewards) for i, data in enumerate(recipe.data)]
    return [(key, rewards) for key, rewards in [(("rewards",), recipe.rewards), *own] if rewards]


def _one_spelling(loaded: LoadedRecipe) -> Iterator[Problem]:
    """Find sources that name a reward in both ways, and settings of a single reward that no source reads."""
    recipe = loaded.recipe
    for i, data in enumerate(recipe.data):
        if data.rewards and data.reward:
            message = f"source {i} has both `data.reward` ({data.reward}) and a list `[[data.rewards]]`"
            yield Problem(message, loaded.where(("data", i, "reward")), "move it into the list, as one more table")
    if recipe.rewards and recipe.reward.name:
        message = f"the recipe has both `reward.name` ({recipe.reward.name}) and a list `[[rewards]]`"
        yield Problem(message, loaded.where(("reward", "name")), "move it into the list, as one more table")
    if recipe.rewards and all(data.rewards or data.reward for data in recipe.data):
        message = "`[[rewards]]` is never used: every [[data]] names rewards of its own"
        yield Problem(message, loaded.where(("rewards",)), "remove one of the two", "warning")
    if not all(data.all_rewards for data in recipe.data):
        return
    defaults = Reward()
    for key in OF_ONE_REWARD[1:]:
        if getattr(recipe.reward, key) != getattr(defaults, key):
            message = f"`reward.{key}` belongs to a single reward, and every source has a list of rewards"
            yield Problem(
                message, loaded.where(("reward", key)), f"set `{key}` in the table of the reward that it is for"
            )


def _wiring(loaded: LoadedRecipe) -> Iterator[Problem]:
    """Find labels that two rewards have, and gates that name no reward or go round in a circle."""
    for key, rewards in reward_lists(loaded):
        labels = [one.label if one.label is not None else label_from(one.name) for one in rewards]
        for fault in faults(labels, [one.gate for one in rewards]):
            place: Key = (*key, fault.index)
            yield Problem(fault.message, loaded.where((*place, fault.key), (*place, "name")), fault.hint)


def _accuracy(loaded: LoadedRecipe) -> Iterator[Problem]:
    """Find an accuracy that names no reward of the only list of rewards."""
    part, lists = loaded.recipe.reward.accuracy, reward_lists(loaded)
    if part is None or len(lists) != 1 or not all(data.all_rewards for data in loaded.recipe.data):
        return
    labels = [one.label or label_from(one.name) for one in lists[0][1]]
    if label_of(part) not in labels:
        hint = f'accuracy = "LABEL.PART"; the rewards: {", ".join(labels)}'
        message = f"`reward.accuracy` is `{part}`, and no reward is called `{label_of(part)}`"
        yield Problem(message, loaded.where(("reward", "accuracy")), hint)


def _weights(loaded: LoadedRecipe) -> Iterator[Problem]:
    for key, rewards in reward_lists(loaded):
        if not any(one.weight for one in rewards):
            message = f"every weight in `{dotted(key)}` is 0: all scores are equal"
            yield Problem(message, loaded.where((*key, 0, "weight"), key))
        for i, one in enumerate(rewards):
            if one.weights and not any(one.weights.values()):
                message = f"every weight in `{dotted((*key, i))}.weights` is 0: this reward is 0 for every response"
                yield Problem(message, loaded.where((*key, i, "weights")), "set `weight = 0.0` to report it only")


def _unused(loaded: LoadedRecipe) -> Iterator[Problem]:
    """Find settings that the reward of a table does not read."""
    for key, rewards in reward_lists(loaded):
        for i, one in enumerate(rewards):
            if one.style != "auto" and not is_file_reward(one.name):
                message = f"`{dotted((*key, i))}.style` does nothing: `{one.name}` is a built-in reward"
                yield Problem(message, loaded.where((*key, i, "style")), None, "warning")
            if one.profile != "default" and one.name != OF_TASK:
                message = f"`{dotted((*key, i))}.profile` is for the task's own reward, and this one is `{one.name}`"
                yield Problem(message, loaded.where((*key, i, "profile")), f'name = "{OF_TASK}"')


REWARD_LIST_RULES = (_one_spelling, _wiring, _accuracy, _weights, _unused)
