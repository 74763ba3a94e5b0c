"""Readers of other systems' configurations: YAML, JSON, override lists and launch scripts. Scripts are never run.

shlex splits a shell script into words. Variables and arrays that the script sets to plain text are replaced by their
values. `$(...)`, back quotes and variables that the script does not set are kept as they are and listed in a note.
"""

from __future__ import annotations

import ast
import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from vlmrl.errors import RecipeError
from vlmrl.recipe.files import MAX_RECIPE_BYTES
from vlmrl.redaction.redact import excerpt, first_line

MAX_KEYS = 5000
"""Maximum number of settings of a configuration, and of words in its arrays."""
_ARRAY = re.compile(r"([A-Za-z_]\w*)(\+?)=\((.*)", re.DOTALL)
_DECLARES = frozenset({"declare", "typeset", "local", "readonly", "export"})
_ELEMENTS = re.compile(r"\$\{([A-Za-z_]\w*)\[[@*]\]\}")


class ShellArrays:
    """Arrays of a script: `NAME=(...)` and `NAME+=(...)` over any number of lines. Their words replace `"${NAME[@]}"`.

    Arrays inside a condition are skipped, because it is unknown which branch would run.
    """

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes
        self.elements: dict[str, list[str]] = {}
        self.filled: list[str] | None = None  # words of the array whose closing `)` has not been read yet
        self.depth = 0

    def expand(self, words: Sequence[str]) -> list[str]:
        expanded: list[str] = []
        for word in words:
            match = _ELEMENTS.fullmatch(word)
            inner = self.elements.get(match.group(1)) if match else None
            expanded += [word] if inner is None or len(expanded) + len(inner) > MAX_KEYS else inner
        return expanded

    def take(self, words: list[str]) -> bool:
        """Add a line's words to the array that it belongs to. Return False if it belongs to none."""
        if self.filled is None:
            bare = words
            while bare and (bare[0] in _DECLARES or (len(bare) < len(words) and bare[0].startswith("-"))):
                bare = bare[1:]
            match = _ARRAY.fullmatch(bare[0]) if bare else None
            if match is None:
                begins = bool(words) and words[0] in ("if", "case", "for", "while", "until")
                ends = sum(
                    word.rstrip(";") in ("fi", "esac", "done") and (n == 0 or words[n - 1].endswith(";"))
                    for n, word in enumerate(words)
                )
                self.depth = max(0, self.depth + begins - ends)
                return False
            name, more, first = match.groups()
            words = [first, *bare[1:]] if first else bare[1:]
            if self.depth:
                self.notes.append(f"`{name}{more}=(...)` depends on a condition: its settings were skipped")
                self.filled = []
            else:
                self.filled = self.elements[name] = list(self.elements.get(name, [])) if more else []
        open_array, depth = self.filled, 0
        for n, word in enumerate(words):
            depth += word.count("(") - word.count(")")
            if depth < 0:  # end of the array, not of a `$(command)` in it; what follows is no element
                last = word[: word.rindex(")")]
                words, self.filled = [*words[:n], *([last] if last else [])], None
                break
        open_array += self.expand(words)[: MAX_KEYS - len(open_array)]
        return True


MAX_DEPTH, MAX_WORD_CHARS, MOST_DIGITS = 20, 10_000, 40
MAX_VALUES = 100_000
SYSTEMS = ("easyr1", "verl", "rllava", "trl")
OTHERS = {
    "LLaMA-Factory": {"finetuning_type", "lora_target", "cutoff_len", "val_size", "template", "llamafactory-cli"},
    "ms-swift": {"swift", "sft", "rlhf", "train_type", "freeze_vit", "freeze_aligner", "rlhf_type"},
}
"""Tool that cannot be imported -> names of settings and programs that TRL does not have. Two names recognise it."""
NULLS = ("null", "~", "")
OWN_PROGRAMS = ("rllava.train.", "rllava/train/")
"""Prefixes of RLLaVA's programs. Its programs use settings of the same name for different purposes."""
MOST_REFERENCES = 4
TRL_CALLS = ("GRPOConfig", "GRPOTrainer")
CODE = ("tools", "environment_factory", "reward_funcs")
"""Arguments of TRL's trainer that are functions or classes."""
ADAPTER = {"r": "lora_r", "target_modules": "lora_target_modules"}
"""Argument of peft's `LoraConfig` -> TRL's name of it. The others that TRL knows have the same names."""

_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^{}]*))?\}|\$([A-Za-z_]\w*)")
_FILLED_IN = re.compile(r"\$[({@*\w]|`")
_PRODUCT = re.compile(r"\$\(\(\s*(\d{1,9}(?:\s*\*\s*\d{1,9}){0,3})\s*\)\)")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_OVERRIDE = re.compile(r"[+~]{0,2}([A-Za-z_][\w.@/-]*)=(.*)", re.DOTALL)
_SCRIPT = re.compile(r"(?:^|\s)((?:[\w.-]+/)*[\w.-]+\.sh)\b", re.MULTILINE)
_NUMBER = re.compile(r"[+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_REFERENCE = re.compile(r"\$\{(oc\.select:|oc\.env:)? *([A-Za-z_][\w.]*)(?:, *([^{}$]*))?\}")


@dataclass
class Foreign:
    """Configuration of another system.

    Args:
        system: one of SYSTEMS.
        values: dotted key -> value; settings without a value (null) are absent.
        notes: remarks for the user about the reading of the file.
    """

    system: str
    values: dict[str, Any]
    file: Path
    notes: list[str] = field(default_factory=list)


def read_foreign(file: Path, system: str | None = None) -> Foreign:
    """Read a configuration of `system`, one of SYSTEMS. None = recognise the system by keys and program names.

    Raises: RecipeError when the file cannot be read, has no settings, or its system is not recognised.
    """
    text = _text(file)
    notes: list[str] = []
    words: list[str] = []
    if file.suffix.lower() in (".json", ".yaml", ".yml"):
        values = _from_table(text, file, notes)
    elif file.suffix.lower() == ".py":
        values, system = _from_python(text, file, notes), system or "trl"
    else:
        words = _launch_words(text, notes)
        values = _from_words(words, file, notes)
    if not values:
        hint = "give a YAML or JSON file, key=value overrides, a launch script or a Python script of TRL, with settings"
        hint = "; ".join([*notes[:3], hint])
        raise RecipeError("no settings were found in this file", where=str(file), hint=hint)
    other = next((tool for tool, names in OTHERS.items() if len(names & {*values, *words[:9]}) > 1), None)
    if other is not None and system is None:
        hint = f"configurations of {', '.join(SYSTEMS)} can be imported; `vlmrl init FOLDER` writes a first recipe"
        raise RecipeError(f"this is a configuration of {other}, which cannot be imported", where=str(file), hint=hint)
    system_name = system or _system_of(values, words)
    if system_name is None:
        hint = f"name the system: --system {', '.join(SYSTEMS)}"
        if started := list(dict.fromkeys(_SCRIPT.findall(text)))[:4]:
            hint = f"it starts {' and '.join(started)}: import the file that has the settings; or {hint}"
        raise RecipeError("nothing in this file tells which system it belongs to", where=str(file), hint=hint)
    script = beside(next((word for word in words if word.endswith(".py")), ""), file.parent)
    if system_name == "trl" and script is not None:
        code = _from_python(_text(script), script, [])
        values = {name: code[name] for name in (*CODE, "__script__") if name in code} | values
    return Foreign(system_name, _resolved(values), file, notes)


def beside(name: str, folder: Path) -> Path | None:
    """Return the file that a configuration names: from the current folder, or from one above the configuration."""
    folder = folder.resolve()
    return next(
        (p for p in (Path(name), *(up / name for up in (folder, *folder.parents))) if name and p.is_file()), None
    )


def read_table(file: Path) -> Any:
    """Return the content of a YAML or JSON file. Raises: RecipeError when it cannot be read."""
    return _parsed(_text(file), file, {})


def _from_python(text: str, file: Path, notes: list[str]) -> dict[str, Any]:
    """Return the arguments of TRL's configuration and trainer in a Python script, which is parsed and never run.

    Functions and classes (`CODE`) are named as file.py:name, and a `LoraConfig` becomes TRL's own arguments for it.
    Other values that the script computes are left out: their names are the list `__computed__`.
    """
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RecipeError(f"this Python script cannot be read: {first_line(error)}", where=str(file)) from None
    imports = [(n.module, alias) for n in nodes if isinstance(n, ast.ImportFrom) and n.module for alias in n.names]
    origin = {a.asname or a.name: f"{module.replace('.', '/')}.py:{a.name}" for module, a in imports}
    assigned = {t.id: n.value for n in nodes if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}

    def code(node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            return origin.get(node.id, f"{file.name}:{node.id}")
        if isinstance(node, ast.Dict):
            notes.append(f"write the dict of environments as `ENVIRONMENTS = {{...}}` into {file.name}")
            return f"{file.name}:ENVIRONMENTS"
        return [code(one) for one in node.elts] if isinstance(node, (ast.List, ast.Tuple)) else literal(node)

    def literal(node: ast.expr) -> Any:
        return ast.literal_eval(assigned.get(node.id, node) if isinstance(node, ast.Name) else node)

    def called(node: ast.AST) -> str:
        return getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""

    values: dict[str, Any] = {}
    computed: list[str] = []

    def read(call: ast.Call, names: Mapping[str, str], prefix: str = "") -> None:
        for name, node in ((k.arg, k.value) for k in call.keywords if k.arg and k.arg != "args"):
            config = assigned.get(node.id, node) if isinstance(node, ast.Name) else node
            if isinstance(config, ast.Call) and (name, called(config)) == ("peft_config", "LoraConfig"):
                values.update(use_peft=True, lora_r=8, lora_alpha=8)  # peft's defaults are not TRL's
                read(config, ADAPTER, "peft_config.")
                continue
            try:
                value = code(node) if name in CODE else literal(node)
            except (ValueError, TypeError, RecursionError, MemoryError):
                computed.append(prefix + name)
                continue
            values.update({names.get(name, name): value} if value is not None else {})

    for call in nodes:
        if isinstance(call, ast.Call) and called(call) in TRL_CALLS:
            read(call, {"model": "model_name_or_path"})
    return flatten(values | {"__script__": file.name, "__computed__": computed} if values else {}, file)


def flatten(value: Any, file: Path) -> dict[str, Any]:
    """Return nested mappings as dotted keys. Raises: RecipeError if it is not a mapping, or has too many keys."""
    if not isinstance(value, Mapping):
        raise RecipeError("this file does not hold a table of settings", where=str(file))
    settings: dict[str, Any] = {}
    for name, inner in _leaves(value, ""):
        settings[name] = inner
        if len(settings) > MAX_KEYS:
            raise RecipeError(f"this file has more than {MAX_KEYS} keys: so it is not a configuration", where=str(file))
    return settings


def _leaves(value: Mapping[Any, Any], prefix: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    for name, inner in value.items():
        key = f"{prefix}{name}"
        if isinstance(inner, Mapping) and inner:
            if depth > MAX_DEPTH:
                raise RecipeError("tables are nested too deeply in this file: so it is not a configuration")
            yield from _leaves(inner, f"{key}.", depth + 1)
        elif inner is not None:
            yield key, plain_value(inner) if isinstance(inner, str) else inner


def plain_value(text: str) -> Any:
    """Return the value of a text: a number, True, False, None, or a list of these; else the text without quotes.

    `1e-6` is a number here, although YAML 1.1 reads it as text.
    """
    text = text.strip()
    if text in NULLS:
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if len(text) <= MOST_DIGITS and _NUMBER.fullmatch(text):
        whole = re.fullmatch(r"[+-]?\d[\d_]*", text)
        return int(text.replace("_", "")) if whole else float(text)
    if len(text) > 1 and text[0] == "[" and text[-1] == "]":
        inner = text[1:-1].strip()
        return [plain_value(part) for part in inner.split(",")] if inner else []
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        return text[1:-1]
    return text


def _text(file: Path) -> str:
    try:
        if not (file.is_file() or file.is_dir()) and file.exists():  # reading a pipe or a device may never end
            raise RecipeError("cannot read the configuration: it is a pipe or a device", where=str(file))
        if file.stat().st_size > MAX_RECIPE_BYTES:
            raise RecipeError(
                f"this file has more than {MAX_RECIPE_BYTES:,} bytes: so it is not a configuration", where=str(file)
            )
        return file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise RecipeError(f"cannot read the configuration: {error.strerror}", where=str(file)) from None
    except UnicodeDecodeError:
        raise RecipeError("this file is not UTF-8 text", where=str(file)) from None


def _parsed(text: str, file: Path, twice: dict[str, None]) -> Any:
    """Parse JSON if the file's name ends with .json, else YAML. Add names that a table repeats to `twice`."""
    import yaml

    def repeated(names: Iterable[str]) -> None:
        twice.update(dict.fromkeys(name for name, count in Counter(names).items() if count > 1 and name != "<<"))

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        repeated(name for name, _ in items)
        return dict(items)

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            repeated(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            return super().construct_mapping(node, deep=deep)

    kind = "JSON" if file.suffix.lower() == ".json" else "YAML"
    try:
        if kind == "JSON":
            return json.loads(text, object_pairs_hook=pairs)
        _check_size(yaml.parse(text, yaml.SafeLoader), file)
        return yaml.load(text, Loader)
    except RecursionError:
        raise RecipeError("lists or tables are nested too deeply", where=str(file)) from None
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else getattr(error, "lineno", None)
        what = getattr(error, "problem", None) or getattr(error, "msg", None) or error
        where = f"{file}:{line}" if line else str(file)
        raise RecipeError(f"this is not valid {kind}: {what}", where=where) from None


def _check_size(events: Iterable[Any], file: Path) -> None:
    """Check a YAML file before its values are made: its depth, and its number of values with all aliases written out.

    The parser gives events one by one and does not recurse; a few lines of aliases can stand for gigabytes.
    """
    sizes: dict[Any, int] = {}
    open_nodes: list[tuple[Any, int]] = [(None, 0)]  # anchor, and the number of values so far
    for event in events:
        kind, anchor = type(event).__name__, getattr(event, "anchor", None)
        size = 0
        if kind in ("SequenceStartEvent", "MappingStartEvent"):
            sizes.pop(anchor, None)  # a list that contains itself has no size
            open_nodes.append((anchor, 1))
            if len(open_nodes) > 2 * MAX_DEPTH:
                line = event.start_mark.line + 1
                raise RecipeError("lists or tables are nested too deeply", where=f"{file}:{line}")
        elif kind in ("SequenceEndEvent", "MappingEndEvent"):
            anchor, size = open_nodes.pop()
        elif kind == "ScalarEvent":
            size = 1
        elif kind == "AliasEvent":
            size = sizes.get(anchor, MAX_VALUES + 1)
        if anchor and kind != "AliasEvent" and size:
            sizes[anchor] = size
        parent, total = open_nodes[-1]
        open_nodes[-1] = (parent, total + size)
        if total + size > MAX_VALUES:
            what = f"this file stands for more than {MAX_VALUES:,} values, its aliases written out"
            raise RecipeError(f"{what}: so it is not a configuration", where=f"{file}:{event.start_mark.line + 1}")


def _from_table(text: str, file: Path, notes: list[str]) -> dict[str, Any]:
    """Return the settings of a YAML or JSON file: a table, or a list of overrides as Hydra stores it."""
    twice: dict[str, None] = {}
    value = _parsed(text, file, twice)
    names = [excerpt(name, 80) for name in islice(twice, 20)]
    notes += [f"`{name}` is written twice in {file.name}: the last one was taken" for name in names]
    if isinstance(value, list) and value and all(isinstance(v, str) for v in value):
        return _overrides(value)
    return flatten(value, file)


def _launch_words(text: str, notes: list[str]) -> list[str]:
    """Return the words of a script's launch command (the command with most settings); variables are replaced."""
    variables: dict[str, str] = {}
    arrays = ShellArrays(notes)
    commands: list[list[str]] = []
    doubtful: dict[str, str] = {}
    text = _PRODUCT.sub(lambda match: str(math.prod(map(int, match.group(1).split("*")))), text)  # $((1024 * 4))
    lines = re.sub(r"\\[ \t]*(?:\n|\Z)", " ", text.replace("\r\n", "\n")).splitlines()
    for line in lines:
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            notes.append(f"a line with an open quote was skipped: {excerpt(line.strip(), 80)}")
            continue
        words = [_put_in(word, variables) for word in words]
        if arrays.take(words):
            continue
        words = arrays.expand(words)
        while words and words[0] in ("export", "declare", "readonly", "local"):
            words = words[1:]
        if words and all(_ASSIGNMENT.match(word) and "." not in word.partition("=")[0] for word in words):
            for name, value in (word.split("=", 1) for word in words):
                first_value = variables.get(name)
                if arrays.depth and first_value and first_value != value:  # set in a branch that may not run
                    doubtful[name] = first_value
                else:
                    variables[name] = value
                    if not arrays.depth:
                        doubtful.pop(name, None)
        if words:
            commands.append(words)
    for name, first_value in doubtful.items():
        if re.search(rf"\$\{{?{name}\b", text):
            notes.append(f"`{name}` depends on a condition: its first value `{excerpt(first_value, 80)}` was taken")
    settings = [sum(_is_setting(word) for word in words) for words in commands]
    if not commands or not max(settings):
        return []
    alone = [words for words, count in zip(commands, settings, strict=True) if count == len(words)]
    best = commands[settings.index(max(settings))]
    chosen = best if len(best) > 1 or len(alone) < 2 else [word for words in alone for word in words]
    if sum(count > 2 for count in settings) > 1 and chosen is best:
        notes.append("the file has several commands with settings; the one with most of them was read")
    open_words = [excerpt(word, 80) for word in chosen if _FILLED_IN.search(word)]
    notes += [f"`{word}` is filled in by the shell; here it stays as it is" for word in open_words]
    return chosen


def _put_in(word: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        current, default = variables.get(match.group(1) or match.group(3)), match.group(2)
        if default is not None:
            return current or default  # `:-` also replaces an empty value
        return match.group() if current is None else current

    for _ in range(3):  # `${NAME:-x_${OTHER}}` from the inside out
        replaced = _VARIABLE.sub(value, word) if len(word) <= MAX_WORD_CHARS else word
        if replaced == word or len(replaced) > MAX_WORD_CHARS:  # values that contain variables can double per line
            break
        word = replaced
    return word


def _is_setting(word: str) -> bool:
    return bool(_OVERRIDE.fullmatch(word)) or (word.startswith("--") and len(word) > 2)


def _from_words(words: Sequence[str], file: Path, notes: list[str]) -> dict[str, Any]:
    """Return a command's settings. They override those of its configuration file (`config=FILE`, `--config FILE`)."""
    own = _overrides(words) | _flags(words)
    if program := next((word for word in words if word.startswith(OWN_PROGRAMS)), None):
        own["__program__"] = program
    config_name = own.pop("config", None)
    values: dict[str, Any] = {}
    if isinstance(config_name, str):
        if _FILLED_IN.search(config_name):  # `$(dirname "$0")/config.yaml`: probably beside the script
            config_name = config_name.rpartition("/")[2]
        config_file = beside(config_name, file.parent)
        if config_file is None:
            notes.append(f"`{config_name}`, which the command starts from, was not found: {EXAMPLE_SAYS}")
            values = {"__config__": config_name}
        else:
            values = _from_table(_text(config_file), config_file, notes)
            notes.append(f"settings of {config_file} are included")
    return values | own


EXAMPLE_SAYS = "the known settings of the system's own example are taken for it, else the system's defaults"


def _overrides(words: Sequence[str]) -> dict[str, Any]:
    """Read `key=value` and `+key=value`, as OmegaConf and Hydra do. Skip `~key`, which removes a key in Hydra."""
    settings: dict[str, Any] = {}
    for word in words:
        if (match := _OVERRIDE.fullmatch(word)) and not word.startswith(("~", "--")):
            key, text = match.groups()
            table = _table_of(text)
            settings |= {key: plain_value(text)} if table is None else dict(islice(_leaves(table, f"{key}."), MAX_KEYS))
    return settings


def _table_of(text: str) -> dict[str, Any] | None:
    """Return the table that is written as `{"a": 1}` or `{a:1,b:2}`; None for other texts and for an empty table."""
    if not (text.startswith("{") and text.endswith("}")):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        items = [item.partition(":") for item in text[1:-1].split(",")]
        plain = not any(sign in text[1:-1] for sign in "{}[]\"'")
        value = {name.strip(): plain_value(v) for name, _, v in items} if plain and all(i[1] for i in items) else None
    return value if isinstance(value, dict) and value else None


def _flags(words: Sequence[str]) -> dict[str, Any]:
    """Read `--key value`, `--key=value`, `--key` (true) and `--key a b` (a list), as argparse does."""
    flags: dict[str, Any] = {}
    name: str | None = None
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].replace("-", "_").partition("=")
            flags[name] = plain_value(value) if equals else True
            name = None if equals else name
        elif name is not None and "=" not in word:
            before = flags[name]
            value = plain_value(word)
            flags[name] = value if before is True else [*before, value] if isinstance(before, list) else [before, value]
        else:
            name = None
    return flags


def _resolved(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace references to other keys, and remove None values.

    `${KEY}` and `${oc.select:KEY,512}` become the key's value; the second form becomes its default if the key is
    missing. `${oc.env:NAME,x}` always becomes its default.
    """
    settings = {}
    for key, value in values.items():
        for _ in range(MOST_REFERENCES):  # a reference may lead to another one, or to itself
            if not isinstance(value, str) or (match := _REFERENCE.fullmatch(value)) is None:
                break
            source, name, default = match.groups()
            known = name in values and source != "oc.env:"
            value = values[name] if known else value if default is None else plain_value(default)
        if value is not None:
            settings[key] = value
    return settings


def _system_of(values: Mapping[str, Any], words: Sequence[str]) -> str | None:
    if any(key.startswith("actor_rollout_ref.") for key in values) or "verl.trainer.main_ppo" in words:
        return "verl"
    if "__program__" in values or any(key.startswith("actor.") for key in values):
        return "rllava"
    if (
        any(key.startswith("worker.") for key in values)
        or "verl.trainer.main" in words
        or "data.rollout_batch_size" in values
    ):
        return "easyr1"
    known = {
        "num_generations",
        "per_device_train_batch_size",
        "max_completion_length",
        "beta",
        "loss_type",
        "epsilon",
        "learning_rate",
        "gradient_accumulation_steps",
        "scale_rewards",
        "reward_funcs",
    }
    return "trl" if len(known & values.keys()) >= 2 else None
