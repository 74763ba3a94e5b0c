"""Conversion of pydantic's errors to messages with the key as typed, its value, its place, and a correction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_origin

from pydantic import BaseModel

from vlmrl.errors import Problem, nearest
from vlmrl.recipe.key_fields import field_at, key_name, literal_choices, table_class
from vlmrl.recipe.toml_lines import Key, dotted
from vlmrl.redaction.redact import excerpt

FOREIGN_KEYS = {
    name: key
    for key, names in {
        "optim.lr": "learning_rate",
        "rollout.prompts_per_step": "batch_size train_batch_size rollout_batch_size "
        "per_device_train_batch_size gradient_accumulation_steps global_batch_size",
        "rollout.samples_per_prompt": "group_size num_generations n num_samples",
        "train.steps": "max_steps num_steps",
        "train.epochs": "total_epochs num_epochs num_train_epochs",
        "optim.schedule": "lr_scheduler_type lr_scheduler",
        "optim.warmup_steps": "lr_warmup_steps",
        "optim.warmup_ratio": "lr_warmup_ratio",
        "algo.kl_coef": "beta kl kl_loss_coef",
        "algo.clip_low": "epsilon clip_ratio clip_ratio_low",
        "algo.clip_high": "epsilon_high clip_ratio_high",
        "algo.name": "loss_type algorithm",
        "rollout.max_new_tokens": "max_completion_length max_response_length max_tokens",
        "rollout.max_prompt_tokens": "max_prompt_length cutoff_len max_length max_seq_length model_max_length",
        "model.path": "model_path model_name model_name_or_path",
        "model.dtype": "bf16 fp16 torch_dtype precision mixed_precision",
        "model.freeze": "freeze_vision_tower freeze_vit freeze_aligner freeze_llm",
        "lora.rank": "r lora_r lora_rank",
        "lora.alpha": "lora_alpha",
        "lora.dropout": "lora_dropout",
        "lora.targets": "lora_target target_modules lora_target_modules",
        "data.path": "dataset train_files",
        "data.validation": "val_size split_dataset_ratio val_files",
        "checkpoint.every_steps": "save_steps save_freq save_interval",
        "checkpoint.keep_last": "save_total_limit",
        "eval.every_steps": "eval_steps eval_freq test_freq",
        "optim.max_grad_norm": "grad_clip max_grad_norm",
        "reward.name": "reward_function reward_funcs",
        "rewards.weight": "reward_weights",
        "train.tokens_per_row": "micro_batch_size",
    }.items()
    for name in names.split()
}
"""Name of a key in other systems -> its name here. It is used for hints only; other names are not accepted."""
IN_SFT = {"rollout.prompts_per_step": "train.rows_per_step"}
"""Key of reinforcement learning -> its counterpart in supervised training."""

_LIMITS = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}
"""Kind of pydantic's error -> (name of the bound in the error's context, words before the bound)."""
_EXPECTED_TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
}
"""Kind of pydantic's error -> the type that was expected, in words."""
_NUMBERS = ("bool_type", "int_type", "int_from_float", "float_type")
"""Kinds of pydantic's errors about the type of a number or a bool."""
_BRANCHES = ("[key]", "list[", "literal[")
"""Prefixes of names that pydantic inserts into the location of an error: for dict keys and members of a union."""


def problems_of(
    findings: Sequence[Mapping[str, Any]], root: type[BaseModel], where: Callable[[Key], str | None]
) -> list[Problem]:
    """Convert pydantic's error records to `Problem`s.

    Args:
        findings: result of `ValidationError.errors()`.
        root: the class that was validated.
        where: function that returns `file:line` of a key; for a missing key, that of the table around it.
    """
    groups: dict[Key, list[Mapping[str, Any]]] = {}
    for finding in findings:
        groups.setdefault(_place(finding, root), []).append(finding)
    problems = []
    for key, group in groups.items():
        for message, hint in _words_of_branches(group, key, root):
            problems.append(Problem(message, where(key), hint))
    return problems


def _place(finding: Mapping[str, Any], root: type[BaseModel]) -> Key:
    """Return the key of an error record, without pydantic's names for members of a union (`list[str]`, `bool`)."""
    key = tuple(p for p in finding["loc"] if not (isinstance(p, str) and p.startswith(_BRANCHES)))
    field = field_at(root, key[:-1])
    is_dict = field is not None and get_origin(field.annotation) is dict
    has_words = field is not None and not is_dict and not table_class(root, key[:-1])
    return key[:-1] if has_words and isinstance(key[-1], str) else key


def _words_of_branches(
    group: Sequence[Mapping[str, Any]], key: Key, root: type[BaseModel]
) -> Iterator[tuple[str, str | None]]:
    """Yield (message, hint) for the error records of one key, of which pydantic makes one per type that it may have.

    If the value is similar to a fixed word, the record about the word alone counts. A value that may be a word or a
    list has the record about the list. The records about other types become one message.
    """
    value = group[0].get("input")
    word = next((f for f in group if f["type"] == "literal_error"), None)
    kinds = {f["type"] for f in group}
    if len(group) == 1 or (word is None and not kinds & {"string_type"}):
        yield from (_words(finding, key, root) for finding in group)
    elif word is not None and isinstance(value, str) and nearest(value, _choices(root, key)):
        yield _words(word, key, root)
    elif not all(
        f is word or f["type"] in _NUMBERS or f["type"] in _LIMITS or f["type"] == "string_type" for f in group
    ):
        yield from (_words(finding, key, root) for finding in group if finding is not word)
    else:
        hints = [hint for f in group if (hint := _words(f, key, root)[1]) and f["type"] == "bool_type"]
        *others, last = dict.fromkeys(_expected(finding) for finding in group)
        expected = f"{', '.join(others)} or {last}"
        yield (
            f"`{dotted(key)}` is {show(value)}; it must be {expected}",
            next(iter(hints), None) or _help_hint(root, key),
        )


def _expected(finding: Mapping[str, Any]) -> str:
    """Return what a value must be, by one error record, in words."""
    kind = finding["type"]
    if kind == "literal_error":
        return finding["ctx"]["expected"].replace("'", '"').replace(" or ", ", ")
    if kind in _LIMITS:
        bound, words = _LIMITS[kind]
        return f"a number {words} {shown_bound(finding['ctx'][bound])}"
    return _EXPECTED_TYPES.get(kind) or str(finding["msg"])


def _words(finding: Mapping[str, Any], key: Key, root: type[BaseModel]) -> tuple[str, str | None]:
    """Return (message, hint) for one error record."""
    kind, value, name = finding["type"], finding.get("input"), dotted(key)
    if kind == "extra_forbidden":
        return unknown_key(key, value, root)
    if kind == "missing":
        return _missing(key, root)
    if kind == "literal_error":
        near = nearest(str(value), _choices(root, key))
        hint = f"did you mean `{near}`?" if near else _help_hint(root, key)
        return f"`{name}` is {show(value)}; it must be one of {finding['ctx']['expected']}", hint
    if kind in _LIMITS:
        bound, words = _LIMITS[kind]
        limit = f"{words} {shown_bound(finding['ctx'][bound])}"
        return f"`{name}` is {show(value)}; it must be {limit}", _help_hint(root, key)
    if kind in ("string_too_short", "too_short"):
        return f"`{name}` is empty", _help_hint(root, key)
    if kind in _EXPECTED_TYPES:
        return _wrong_type(kind, value, key, root)
    return f"`{name}` is {show(value)}: {finding['msg']}", _help_hint(root, key)


def foreign_hint(name: str) -> str:
    """Return a hint with vlmrl's key for a name in FOREIGN_KEYS."""
    key = FOREIGN_KEYS[name]
    also = f" or, in sft, `{IN_SFT[key]}`" if key in IN_SFT else ""
    return f"vlmrl's key is `{key}`{also} (`vlmrl recipe explain {key}`)"


def unknown_key(key: Key, value: Any, root: type[BaseModel]) -> tuple[str, str]:
    """Return (message, hint) for a key that does not exist."""
    table, name = key[:-1], str(key[-1])
    keys = fields_at(root, table)
    message = f"unknown table `[{dotted(key)}]`" if isinstance(value, dict) else f"unknown key `{dotted(key)}`"
    is_list = bool(table) and (isinstance(table[-1], int) or table[0] == "data")
    shown = f"[[{key_name(table if isinstance(table[-1], int) else table[:1])}]]" if is_list else f"[{dotted(table)}]"
    listing = f"known keys in {shown}: {', '.join(keys)}" if table else f"known: extends, {', '.join(keys)}"
    other_places = [t for t in fields_at(root, ()) if name in fields_at(root, (t,)) and t not in table]
    nearest_key = nearest(name, keys)
    if table and isinstance(value, dict) and name in fields_at(root, ()):
        return message, f"the lines below {shown} belong to it: write [{name}] on a line of its own\n{listing}"
    if other_places:
        first = (0,) if other_places[0] in ("data", "rewards") else ()
        place = dotted((other_places[0], *first, name))
        return message, f"it belongs in another table: `{place}`\n{listing}"
    if name in FOREIGN_KEYS:  # before the nearest key: `steps` is near `save_steps`
        return message, f"{foreign_hint(name)}\n{listing}"
    return message, f"did you mean `{nearest_key}`?  {listing}" if nearest_key else listing


def _missing(key: Key, root: type[BaseModel]) -> tuple[str, str | None]:
    if key == ("model",):
        return "the recipe has no [model] table", 'add:  [model]\n      path = "a local folder or a hub name"'
    if key == ("data",):
        return "the recipe has no [[data]] table", 'add:  [[data]]\n      path = "data/digits"\n      task = "digits"'
    return f"`{dotted(key)}` is missing", _help_hint(root, key)


def _wrong_type(kind: str, value: Any, key: Key, root: type[BaseModel]) -> tuple[str, str | None]:
    name, expected = dotted(key), _EXPECTED_TYPES[kind]
    if kind == "list_type" and isinstance(value, dict):
        return (
            f"`{name}` is one table; it must be a list of tables",
            f"write [[{name}]] with two brackets instead of [{name}]",
        )
    hint = _help_hint(root, key)
    if kind == "list_type":
        hint = f"write {name} = [{_toml(value)}]"
    elif kind in ("int_type", "float_type") and isinstance(value, str) and _is_number(value):
        hint = f"numbers have no quotes, and digits on both sides of the point: {name} = {_plain_number(value)}"
    elif kind == "bool_type" and str(value).lower() in ("true", "false", "yes", "no", "on", "off", "1", "0"):
        good = "true" if str(value).lower() in ("true", "yes", "on", "1") else "false"
        hint = f"write {name} = {good} (lower case, no quotes)"
    elif kind == "string_type" and not isinstance(value, (dict, list)):
        hint = f'strings have quotes: {name} = "{_toml(value)}"'
    elif kind in ("model_type", "model_attributes_type", "dict_type"):
        hint = f"write a table: [{name}] on a line of its own, its keys below"
    return f"`{name}` is {show(value)}; it must be {expected}", hint


def shown_bound(value: float) -> str:
    """Return a bound as text: `1,000,000`, `0.001`, `1e+09`."""
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def show(value: Any) -> str:
    """Return a value as text for a message; strings, tables and lists with their type, long texts cut."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'the string "{excerpt(value, 60, mark="...")}"'
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return excerpt(str(value), 40, mark="...")


def fields_at(root: type[BaseModel], table: Key) -> list[str]:
    """Return the keys of a table; [] if users choose the names in the table, or if `table` is not a table."""
    model = table_class(root, table)
    return list(model.model_fields) if model else []


def _choices(root: type[BaseModel], key: Key) -> list[str]:
    field = field_at(root, key)
    return [str(c) for c in literal_choices(field.annotation)] if field else []


def _help_hint(root: type[BaseModel], key: Key) -> str | None:
    """Return a hint with the key's name and its help text; None if it has no help text."""
    field = field_at(root, key)
    if field is None or not field.description:
        return None
    return f"`{key_name(key).rpartition('.')[2]}`: {' '.join(field.description.split())}"


def _toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else show(value)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _plain_number(text: str) -> str:
    number = float(text)
    return str(int(number)) if number.is_integer() and "." not in text and "e" not in text.lower() else repr(number)
