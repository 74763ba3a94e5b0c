"""Draft of a recipe, made from another system's settings: values that are taken over, changed and left out.

Functions that several imports use are here, one for each group of recipe keys.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlmrl.recipe.explain import toml_value
from vlmrl.recipe.schema import Environment, Recipe
from vlmrl.redaction.redact import excerpt

PLACEHOLDERS = {"model.path": "path/to/model", "data.path": "path/to/rows.jsonl"}
TABLES = tuple(Recipe.model_fields)
LOGGERS = ("tensorboard", "wandb", "trackio")
NO_LOGGERS = ("", "console", "file", "none", "None")
"""Loggers that need no entry in log.sinks: vlmrl always writes their output, or they write nothing."""
KL_NAMES = {
    "kl": "k1",
    "k1": "k1",
    "abs": "abs",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "low_var_kl",
    "k3": "low_var_kl",
    "full": "full",
}
"""verl's name of a KL estimator -> value of `algo.kl`."""
NO_GRADIENT = {f"{kind}+": value for kind, value in KL_NAMES.items()}
"""verl's name with a + -> value of `algo.kl`. In verl these have the value of the estimator without the +, but the
gradient of another estimator."""
DTYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp32": "float32", "float32": "float32"}
SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
}
USUAL_TURNS, SHOWN_TOKENS = Environment().turns, 1024
"""Turns of an episode if the other system has no limit, and tokens for what tools show between two turns."""
ENGINE_KEYS = """gpu_memory_utilization tensor_parallel_size tensor_model_parallel_size data_parallel_size
expert_parallel_size pipeline_model_parallel_size max_model_len max_num_batched_tokens max_num_seqs micro_batch_size
enforce_eager enable_chunked_prefill enable_prefix_caching free_cache_engine load_format dtype quantization async_mode
cudagraph_capture_sizes disable_tqdm disable_log_stats ignore_eos prompt_length response_length trust_remote_code
skip_tokenizer_init scheduling_policy bucket_size engine_kwargs. vllm. sglang."""
"""Settings of an engine that the systems derived from verl share."""
COUNTED_LATER = "the steps are counted when a run starts; the last rows of an epoch are trained on, too"
"""Note about `train.epochs`, used if the import cannot compute the number of steps."""


@dataclass(frozen=True)
class RecipeValue:
    """Recipe value and the settings that it came from.

    Args:
        key: dotted recipe key.
        source: names of the settings, joined by " and "; "a placeholder" if there are none.
        why: difference between its meaning here and in the other system; "" = there is no difference.
    """

    key: str
    value: Any
    source: str
    why: str = ""


@dataclass
class Draft:
    """Recipe under construction, from another system's settings.

    Args:
        system: name of the other system, for messages.
        given: settings that are written in the configuration: dotted key -> value.
        defaults: the system's own defaults: dotted key -> value.
        base: folder of the imported file.
        rows, processes: see `run.import_recipe`.
        taken: recipe key -> its value and sources.
        left: setting -> reason why it is left out of the recipe.
        todo: tasks for the user.
        used: settings that the import has read, taken over or left out.
        unfilled: setting -> its text, which contains a variable that the file does not set.
        last: the setting that was read last, for error messages.
    """

    system: str
    given: dict[str, Any]
    defaults: Mapping[str, Any]
    base: Path
    rows: int | None
    processes: int | None
    taken: dict[str, RecipeValue] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    todo: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    unfilled: dict[str, str] = field(default_factory=dict)
    last: str = ""

    def get(self, key: str) -> Any:
        """Return the value of a setting: as written, else the system's default, else None. Mark the setting as used."""
        self.used.add(key)
        self.last = key
        return self.given.get(key, self.defaults.get(key))

    def written(self, key: str) -> bool:
        return key in self.given

    def put(self, key: str, value: Any, *sources: str, why: str = "") -> None:
        """Set a recipe key from these settings."""
        self.used.update(sources)
        labels = [s if self.written(s) else f"{s}, {self.system}'s default" for s in sources]
        self.taken[key] = RecipeValue(key, value, " and ".join(labels), why)

    def put_number(
        self, key: str, convert: Callable[[Any], Any], source: str, lowest: float | None = None, why: str = ""
    ) -> Any:
        """Set a recipe key from a setting if that is a number, see `number`. Return the number, or None."""
        value = number(convert, self.get(source), lowest)
        if value is not None:
            self.put(key, value, source, why=why)
        return value

    def same(self, names: Mapping[str, str]) -> None:
        """Take over settings with the same meaning in both systems. `names`: the other system's name -> recipe key."""
        for source, key in names.items():
            if (value := self.get(source)) is not None:
                self.put(key, value, source)

    def put_table(self, key: str, start: str) -> None:
        """Set a recipe key whose value is a table, from all settings whose names begin with `start`.

        The table may contain tables, but these may not contain further ones: such settings are left out.
        """
        table: dict[str, Any] = {}
        sources = []
        for source in [name for name in self.given if name.startswith(f"{start}.")]:
            *path, last = source.removeprefix(f"{start}.").split(".")
            inner = table if not path else table.setdefault(path[0], {}) if len(path) == 1 else None
            if not isinstance(inner, dict):
                self.leave(source, f"too deep for `{key}`, or below a plain value: use a flat key")
            elif isinstance(inner.get(last), dict):
                self.leave(source, f"a plain value where `{key}` has a table of the same name")
            else:
                inner[last] = self.given[source]
                sources.append(source)
        if sources:
            self.put(key, table, *sources)

    def leave(self, key: str, why: str) -> None:
        """Record why a setting is left out, if the configuration writes it."""
        if self.written(key):
            self.used.add(key)
            self.left[key] = why

    def leave_all(self, reasons: Mapping[str, str]) -> None:
        """Leave out all unused settings with these names; a name with a dot at its end is a table (`worker.ref.`)."""
        for start, why in reasons.items():
            for key in [k for k in self.given if k == start or (start.endswith(".") and k.startswith(start))]:
                if key not in self.used:
                    self.leave(key, why)

    def drop_unfilled(self) -> None:
        """Remove numbers and switches whose text is a `$VARIABLE` without a value: use defaults, and add notes."""
        for key, value in list(self.given.items()):
            default = self.defaults.get(key)
            if isinstance(value, str) and "$" in value and isinstance(default, (bool, int, float)):
                del self.given[key]
                self.unfilled[key] = value
                shown = excerpt(value, 80)
                self.left[key] = f"`{shown}` is filled in elsewhere: {self.system}'s default {default} was taken"
                self.todo.append(f"set {key}: its value `{shown}` is filled in elsewhere")

    def finish(self) -> None:
        """Record the settings that the import does not know, and set placeholders for required keys without a value."""
        for key in self.given:
            if key not in self.used:
                self.left[key] = "no counterpart is known"
        for key, value in PLACEHOLDERS.items():
            if key not in self.taken:
                self.taken[key] = RecipeValue(key, value, "a placeholder")
                self.todo.append(f"set `{key}`: the configuration does not name it")

    @property
    def changed(self) -> list[RecipeValue]:
        return [t for t in self.taken.values() if t.why]

    def toml(self, about: str) -> str:
        """Return the recipe as TOML. `about`: its first comment. A comment behind each value names its source."""
        tables: dict[str, list[RecipeValue]] = {}
        for taken in self.taken.values():
            table, _, name = taken.key.partition(".")
            tables.setdefault(table if name else "", []).append(taken)
        lines = [_comment(about), *(_comment(f"To do: {todo}.") for todo in self.todo)]
        for table in ("", *TABLES):
            entries = tables.get(table)
            if entries:
                lines += ["", f"[[{table}]]" if table == "data" else f"[{table}]"] if table else [""]
                lines += [_line(taken, table) for taken in entries if taken.key != "rewards"]
        if rewards := self.taken.get("rewards"):
            for reward in rewards.value:
                lines += ["", f"[[rewards]]  {_comment(rewards.source)}"]
                lines += [f"{name} = {toml_value(value)}" for name, value in reward.items()]
        return "\n".join(lines) + "\n"

    def report(self) -> dict[str, Any]:
        """Return the report as JSON values: mapped, changed, left_out, as_here (not needed in a recipe), todo."""
        sources = {word for t in self.taken.values() for word in t.source.split(" and ")}
        silent = [key for key in self.given if key not in sources and key not in self.left]
        return {
            "mapped": [{"key": t.key, "value": t.value, "from": t.source} for t in self.taken.values() if not t.why],
            "changed": [{"key": t.key, "value": t.value, "from": t.source, "why": t.why} for t in self.changed],
            "left_out": [
                {"key": k, "value": self.given.get(k, self.unfilled.get(k)), "why": why} for k, why in self.left.items()
            ],
            "as_here": silent,
            "todo": list(self.todo),
        }

    def data_source(self, train: str, validation: str) -> None:
        """Set one `[[data]]` entry from `name@split` of training and validation.

        If the configuration validates on training rows or on a test split, validation is left out.
        """
        files = self.get(train)
        trained = [str(f) for f in files] if isinstance(files, list) else [str(files)]
        if isinstance(files, list):
            self.todo += [f"add a [[data]] entry for {other}" for other in files[1:]]
            files = files[0] if files else None
        if not files:
            return
        path, _, split = str(files).partition("@")
        data_path = located(path)
        hub = "a hub name; `vlmrl prep` makes a dataset folder of it, with splits and checks"
        self.put("data.path", data_path, train, why="" if data_path == path else hub)
        if split:
            self.put("data.split", split, train)
        held_out = self.get(validation)
        held_out = held_out[0] if isinstance(held_out, list) and held_out else held_out
        if not held_out:
            return
        other, _, other_split = str(held_out).partition("@")
        if str(held_out) in trained:
            self.left[validation] = "validation on training rows measures memory: hold a split out"
            self.todo.append("set [[data]] validation to held-out rows")
        elif other_split == "test" or "test" in Path(other).stem.split("_"):
            self.left[validation] = "a checkpoint chosen on the test split spoils the test: hold a split out, or set"
            self.left[validation] += " [[data]] validation and eval.allow_test_split = true"
            self.todo.append("set [[data]] validation to held-out rows that are not the test split")
        elif other == path and other_split:
            self.put("data.validation", other_split, validation)
        elif Path(other).suffix in (".parquet", ".jsonl", ".json", ".csv"):
            self.put("data.validation", other, validation)
        else:
            self.left[validation] = "validation rows are a split of the same dataset, or a table file"
            self.todo.append("set [[data]] validation to a split of the same dataset, or to a table file")

    def engine_of(self, engine: str, parts: str) -> None:
        """Set rollout.engine; for vLLM also the number of GPUs per engine, but only if the configuration writes it."""
        engine_name, count = self.get(engine), number(int, self.get(parts), 2)
        if engine_name == "vllm":
            self.put("rollout.engine", "vllm", engine)
            if count:
                self.put("rollout.tensor_parallel", count, parts)
            return
        self.leave(engine, f"`{engine_name}`: the engines here are torch and vllm")
        if count:
            self.leave(parts, "only an engine of vLLM uses several GPUs (rollout.tensor_parallel)")

    def filtered_sampling(self, top_p: str, top_k: str) -> None:
        """Set rollout.top_p and rollout.top_k if they filter, and then allow_filtered_sampling, as vlmrl requires."""
        p = number(float, self.get(top_p))
        sources = [top_p] if p is not None and p < 1 else []
        if sources:
            self.put("rollout.top_p", p, top_p)
        if self.put_number("rollout.top_k", int, top_k, 1) is not None:
            sources.append(top_k)
        if sources:
            why = "samples then do not come from the trained policy: no importance correction holds"
            self.put("rollout.allow_filtered_sampling", True, *sources, why=why)

    def updates_of(self, prompts: str, batch: str) -> None:
        """Set train.updates_per_step from the sizes of a step and of an update, which must both count prompts."""
        drawn, each = self.get(prompts), self.get(batch)
        if isinstance(drawn, int) and isinstance(each, int) and each > 0:
            name = batch.rpartition(".")[2]
            why = f"{drawn} prompts per step in updates of {each} prompts ({name} counts prompts there)"
            self.put("train.updates_per_step", max(1, drawn // each), batch, why=why)

    def chosen(self, key: str, value: Any, table: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the cells of `[algo]` that `table` lists for `value`, the value of `key`; leave unknown values out."""
        if value not in table:
            self.left[key] = f"`{value}` has no counterpart: choose an algorithm of `vlmrl recipe list --algos`"
        for cell, choice in table.get(value, {}).items():
            self.put(cell, choice, key)

    def clip_of_one(self, loss: Any, key: str) -> None:
        """Replace a lower clip of 1 or more, which has no effect because a ratio is never below 0.

        For `cispo` and `clip_cov`, set `algo.name` to the variant without a lower bound. For other losses, set the clip
        to a number just below 1.
        """
        low = self.taken.get("algo.clip_low")
        if low is None or low.value < 1:
            return
        del self.taken["algo.clip_low"]
        if loss in ("cispo", "clip_cov"):
            self.put("algo.name", loss, key, why="the algorithm without a lower bound")
        else:
            why = "practically 1: the ratio may fall to 0, as there"
            self.put("algo.clip_low", 1 - 1e-6, low.source.removesuffix(f", {self.system}'s default"), why=why)

    def discounts(self, estimator: Any) -> None:
        """Set algo.gamma and algo.gae_lambda for estimators that use a return per token."""
        if estimator in ("gae", "reinforce_plus_plus") and self.written("algorithm.gamma"):
            self.put("algo.gamma", float(self.get("algorithm.gamma")), "algorithm.gamma")
        if estimator == "gae" and self.written("algorithm.lam"):
            self.put("algo.gae_lambda", float(self.get("algorithm.lam")), "algorithm.lam")

    def spread_filter(self, on: str, tries: str, why: str) -> None:
        """Set algo.filter and its maximum number of draws. `why`: end of the note, about the other system's measure."""
        if self.get(on):
            why = f"prompts whose scores are all equal are replaced by new draws{why}"
            self.put("algo.filter", "spread", on, why=why)
            self.put_number("algo.filter_tries", int, tries, 1)

    def betas_of(self, key: str) -> None:
        betas = self.get(key)
        if isinstance(betas, list) and len(betas) == 2:
            for name, value in zip(("beta1", "beta2"), betas, strict=True):
                self.put(f"optim.{name}", float(value), key)

    def adapter(self, rank: str, alpha: str, targets: str, exclude: str) -> None:
        """Set the `[lora]` table if the rank is above 0. Targets: a list, names separated by commas, or all-linear."""
        if self.put_number("lora.rank", int, rank, 1) is None:
            for key in (alpha, targets, exclude):
                self.leave(key, "no adapter: its rank is 0")
            return
        self.put("lora.alpha", int(self.get(alpha)), alpha)
        layers = self.get(targets)
        if isinstance(layers, str) and layers != "all-linear" and re.fullmatch(r"[\w.]+(?: *, *[\w.]+)*", layers):
            layers = [name.strip() for name in layers.split(",")]
        if isinstance(layers, list) or layers == "all-linear":
            self.put("lora.targets", layers, targets)
        else:
            self.leave(targets, "layers are named by the last parts of their names (lora.targets)")
        self.leave(exclude, "the vision tower has no adapter unless lora.vision = true; see lora.exclude")

    def frozen_tower(self, key: str) -> None:
        if "lora.rank" in self.taken:
            self.leave(key, "with [lora], no weight of the vision tower is trained")
        elif self.get(key):
            self.put("model.freeze", ["vision", "connector"], key, why="the vision tower with its merger, as there")

    def sharding(self, size: str, offload: str, dtype: str) -> None:
        """Set the processes per copy of the model, offloading to main memory, and the type of the arithmetic."""
        self.put_number("parallel.shard_size", int, size, 1)
        if self.get(offload) is True:
            self.put("parallel.offload", True, offload)
        self.arithmetic(dtype)

    def arithmetic(self, key: str) -> None:
        """Set model.dtype if the value of `key` is one of its possible types."""
        dtype = self.get(key)
        if isinstance(dtype, str) and dtype.removeprefix("torch.") in DTYPES:
            self.put("model.dtype", DTYPES[dtype.removeprefix("torch.")], key)
        else:
            self.leave(key, "arithmetic is in bfloat16 or float32 (model.dtype)")

    def thinking(self, key: str) -> None:
        """Set model.thinking if `key` turns the chat template's thinking on or off."""
        if isinstance(on := self.get(key), bool):
            self.put("model.thinking", "on" if on else "off", key)

    def episodes(
        self, names: Sequence[str], source: str, turns: tuple[int | None, str], tokens: str, *, of_turn: bool = False
    ) -> None:
        """Set `[environment]`: its tools, its turns, and the tokens of an episode and of a turn.

        Args:
            names: of functions or of a class, as file.py:name.
            source: setting with these names.
            turns: number of the model's turns and its setting; None = the other system has no limit.
            tokens: setting with the token limit of a whole episode, observations included; with `of_turn`, of a turn.
        """
        name, limit, count = names[0], int(self.get(tokens)), turns[0] or USUAL_TURNS
        if len(names) > 1:
            name = f"{name.partition(':')[0]}:TOOLS"
            functions = ", ".join(one.partition(":")[2] for one in names)
            self.todo.append(f"write `TOOLS = [{functions}]` into {name.partition(':')[0]}")
        self.put("environment.name", name, source)
        if turns[0]:
            self.put("environment.turns", turns[0], turns[1])
        else:
            self.todo.append("set environment.turns: an episode has any number of turns there")
        if of_turn:
            why = f"{count} turns of {limit}, and {SHOWN_TOKENS} for what is shown behind each; there is no limit there"
            self.put("environment.tokens", count * (limit + SHOWN_TOKENS), tokens, why=why)
        else:
            self.put("environment.tokens", limit, tokens)
            why = f"a turn's share of an episode's {limit}: a turn begins only if a whole one fits"
            self.put("rollout.max_new_tokens", max(1, limit // count), tokens, why=why)

    def reward_of(self, table: str) -> None:
        """Take over the reward function of a table in EasyR1's format. A file without `:function` means its `main`."""
        source = f"{table}.reward_function"
        function = self.get(source)
        if not function:
            self.todo.append("name a reward: [reward] name")
            return
        self.put("reward.name", str(function) if ".py:" in str(function) else f"{function}:main", source)
        self.put("reward.style", "easyr1", source)
        self.put_table("reward.args", f"{table}.reward_function_kwargs")

    def trainer_of(self, validation: str, keep: str) -> None:
        """Take over the `trainer` table of EasyR1 and verl: intervals, checkpoints, names.

        Args:
            validation, keep: settings with the steps between validations, and the number of checkpoints to keep.
        """
        saves = ("checkpoint.every_steps", "trainer.save_freq", "end")
        for key, source, when in (("eval.every_steps", validation, "start and the end"), saves):
            every = number(int, self.get(source), 1)
            self.put(key, every or 0, source, why="" if every else f"off there; here 0: at the {when}")
        if self.get("trainer.val_before_train") is False:
            self.put("eval.at_start", False, "trainer.val_before_train")
        elif self.written("trainer.val_before_train"):
            self.left["trainer.val_before_train"] = "validation before the first step is the default (eval.at_start)"
        self.put_number("checkpoint.keep_last", int, keep, 1, why="the best checkpoint is kept, too")
        for key, flag in (("trainer.n_gpus_per_node", "--gpus"), ("trainer.experiment_name", "--name")):
            if value := self.get(key):
                self.left[key] = f"on the command line: vlmrl train RECIPE {flag} {value}"
        self.loggers_of("trainer.logger", {"trainer.project_name": "project", "trainer.entity_name": "entity"})

    def loggers_of(self, key: str, services: Mapping[str, str]) -> None:
        """Set log.sinks if the configuration writes loggers.

        Args:
            key: the setting with the loggers' names.
            services: setting -> key of `[log]`. They are taken over if a logger is a service (any but tensorboard).
        """
        loggers = self.get(key)
        logger_names = [str(name) for name in loggers] if isinstance(loggers, list) else str(loggers or "").split(",")
        sinks = [name for name in logger_names if name in LOGGERS]
        others = [name for name in logger_names if name not in (*LOGGERS, *NO_LOGGERS)]
        if sinks:
            self.put("log.sinks", sinks, key)
        else:
            self.leave(key, "metrics.jsonl is always written; see log.sinks")
        if others:
            class_needed = "write a class for log.sinks (vlmrl/loggers/base.py) if you need it"
            self.todo.append(f"`{', '.join(others)}` of {key}: {class_needed}")
        for source, name in services.items():
            if set(sinks) - {"tensorboard"} and (value := self.get(source)):
                self.put(f"log.{name}", str(value), source)
            else:
                self.leave(source, "for a service, and log.sinks names none")

    def longest_prompt(self) -> None:
        """Set the token limit of a prompt. A longer prompt is an error here; other systems drop or cut it."""
        if (limit := number(int, self.get("data.max_prompt_length"), 1)) is not None:
            what = "dropped without notice" if self.get("data.filter_overlong_prompts") else "cut"
            why = f"`vlmrl check` counts longer rows and reports an error; there they are {what}"
            self.put("rollout.max_prompt_tokens", limit, "data.max_prompt_length", why=why)
        self.leave("data.filter_overlong_prompts", "no row is dropped or cut: see rollout.max_prompt_tokens")

    def kl_of(self, on_loss: str, loss_keys: tuple[str, str]) -> None:
        """Set the keys of the KL, for verl and systems derived from it.

        Args:
            on_loss: setting that turns on the KL in the loss. `algorithm.use_kl_in_reward` does so in the reward, with
                the coefficient of `algorithm.kl_ctrl`.
            loss_keys: settings with the coefficient and with the estimator of the KL in the loss.
        """
        on_reward, control = "algorithm.use_kl_in_reward", "algorithm.kl_ctrl"
        in_loss, in_reward = self.get(on_loss), self.get(on_reward)
        details = (f"{control}.type", f"{control}.target_kl", f"{control}.horizon")
        reward_keys = (f"{control}.kl_coef", "algorithm.kl_penalty", *details)
        coef, kind = loss_keys if in_loss else reward_keys[:2]
        if not in_loss and not in_reward:
            self.put("algo.kl_coef", 0.0, on_loss, on_reward)
            for key in (*loss_keys, *reward_keys):
                self.leave(key, "the KL is off: use_kl_loss and use_kl_in_reward are false")
            return
        for key in reward_keys if in_loss and not in_reward else () if in_loss else loss_keys:
            self.leave(key, f"the KL is only in the {'loss' if in_loss else 'reward'}")
        if in_loss and in_reward:
            self.left[on_reward] = "the KL is in the loss or in the reward, not in both: the loss was taken"
        name = self.get(kind)
        estimator = KL_NAMES.get(name) or NO_GRADIENT.get(name, "low_var_kl")
        why = "" if estimator == name else f"the same estimator; its name here is {estimator}"
        if name in NO_GRADIENT:
            why = "the value of this estimator; the gradient that the + stands for has no counterpart"
        self.put("algo.kl", estimator, kind, why=why)
        self.put("algo.kl_in", "loss" if in_loss else "reward", on_loss)
        self.put("algo.kl_coef", float(self.get(coef)), coef)
        if not in_loss and self.get(f"{control}.type") == "adaptive":
            for name, usual in (("target_kl", 0.1), ("horizon", 10_000)):
                key = f"{control}.{name}"
                self.put(f"algo.kl_{name.removesuffix('_kl')}", float(self.get(key) or usual), key)

    def columns_and_prompt(self) -> None:
        """Set column names and prompt template, for EasyR1 and systems derived from it."""
        settings = {"prompt": "data.prompt_key", "answer": "data.answer_key", "images": "data.image_key"}
        columns = {role: self.get(key) for role, key in settings.items() if self.written(key)}
        usual = {"prompt": "problem", "answer": "answer", "images": "images"}
        if any(columns[role] != usual[role] for role in columns):
            self.put("data.columns", columns, *(settings[role] for role in columns))
        if template := self.get("data.format_prompt"):
            why = "there the row's prompt is `content`; here every column is a variable, and each <image> stays"
            self.put("data.prompt", template, "data.format_prompt", why=f"{why} where the template writes it")
            column = columns.get("prompt", "problem")
            self.todo.append(f"in {template}, write `{{{{ {column} }}}}` in place of `{{{{ content }}}}`")

    def steps_of(self, most: str) -> None:
        """Set train.steps, as written or from the epochs and the number of rows; if rows are unknown, train.epochs."""
        epochs = "trainer.total_epochs"
        steps, prompts = self.put_number("train.steps", int, most, 1), self.taken.get("rollout.prompts_per_step")
        passes = self.get(epochs)
        if steps:
            self.leave(epochs, f"{most} sets the number of steps")
        elif self.rows and prompts and prompts.value and isinstance(passes, (int, float)):
            why = f"{passes:g} passes over {self.rows} rows at {prompts.value} prompts per step"
            self.put("train.steps", max(1, math.floor(self.rows / prompts.value) * int(passes)), epochs, why=why)
        elif isinstance(passes, (int, float)) and passes > 0:
            self.put("train.epochs", float(passes), epochs, why=COUNTED_LATER)

    def schedule_keys(self, kind: str, warmup: str, ratio: str, lowest: str) -> None:
        """Set the schedule of the learning rate and its warm-up. A ratio becomes steps if their number is known."""
        shape = self.get(kind)
        if shape in SCHEDULES:
            self.put("optim.schedule", SCHEDULES[shape], kind)
        elif shape is not None:
            self.left[kind] = f"`{shape}` has no counterpart: choose constant, linear or cosine"
        steps, share = self.get(warmup), self.get(ratio)
        if isinstance(steps, float) and 0 < steps < 1:  # transformers 5 has one setting for number and ratio
            share, ratio = steps, warmup
        steps = number(int, steps, 1)
        total = self.taken.get("train.steps")
        later = "the first step uses lr / warmup_steps, never 0"
        if steps:
            self.put("optim.warmup_steps", steps, warmup, why=later)
        elif isinstance(share, (int, float)) and share > 0:
            if total is not None:
                why = f"{share:g} of train.steps; {later}"
                self.put("optim.warmup_steps", math.ceil(share * total.value), ratio, why=why)
            elif share < 1:
                self.put("optim.warmup_ratio", float(share), ratio, why=later)
            else:
                self.left[ratio] = f"{share:g}: a warm-up cannot be the whole run"
        floor: Any = self.get(lowest)
        if isinstance(floor, (int, float)) and floor > 0 and self.taken.get("optim.schedule") is not None:
            self.put("optim.min_lr_ratio", float(floor), lowest)


def file_name(dotted: str) -> str:
    """Return `package.module.Name` as package/module.py:Name; a text that names a file stays as it is."""
    module, _, name = dotted.rpartition(".")
    return dotted if ".py:" in dotted or not module else f"{module.replace('.', '/')}.py:{name}"


def of_engine(start: str) -> dict[str, str]:
    """Return name -> reason why it is left out, for the settings of an engine whose names begin with `start`."""
    why = "the engine decides this itself; rollout.kv_cache_gib can be set"
    return {f"{start}.{key}": why for key in ENGINE_KEYS.split()}


def number(convert: Callable[[Any], Any], value: Any, lowest: float | None = None) -> Any:
    """Convert `value` to a number. Return None if it is not a number or is below `lowest` (-1 often means "off")."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or (lowest is not None and value < lowest):
        return None
    return convert(value)


def _line(taken: RecipeValue, table: str) -> str:
    name = taken.key.partition(".")[2] if table else taken.key
    return f"{name} = {toml_value(taken.value)}".ljust(40) + f"  {_comment(taken.source)}"


def _comment(text: str) -> str:
    """Return a comment of one line.

    Comments contain names and values of the imported file, so unprintable characters are replaced by `?`.
    """
    return "# " + "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def located(path: str) -> str:
    """Return the path; for a text `org/name` that is no file or folder on this machine, return `hub:org/name`."""
    looks_like_hub = path.count("/") == 1 and not path.startswith((".", "/", "~")) and not Path(path).suffix
    return f"hub:{path}" if looks_like_hub and not Path(path).exists() else path
