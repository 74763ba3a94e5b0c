"""Recipes as new users break them: each is told what is wrong, on which line, and what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vlmrl.data.table_values import TRAINING
from vlmrl.errors import Problem, ProblemsError, RecipeError
from vlmrl.recipe.checks import check_recipe
from vlmrl.recipe.key_fields import field_at
from vlmrl.recipe.load import load_recipe
from vlmrl.recipe.schema import Recipe
from vlmrl.recipe.validation_messages import FOREIGN_KEYS, IN_SFT
from vlmrl.setup.catalogs import catalogs

REST = '\n[[data]]\npath = "rows.jsonl"\n[reward]\nname = "reward.py:score"\n'
SECOND = '[[data]]\npath = "rows.jsonl"\nname = "b"\n'
SOUND = """\
[model]
path = "model"

[[data]]
path = "rows.jsonl"

[reward]
name = "reward.py:score"
"""


REWARD = """\
import time
from random import random


def score(response, truth, *, weight=1.0):
    return 0.0
"""


def problems_of(
    folder: Path, text: str | bytes, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...] = ()
) -> list[Problem]:
    """Everything that loading and checking this recipe reports, in a folder with a model, a table and a reward."""
    monkeypatch.chdir(folder)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": "hi", "answer": "1"}) + "\n")
    (folder / "reward.py").write_text(REWARD)
    (folder / "broken.py").write_text("def score(:\n")
    (folder / "broken.jinja").write_text("one\n{% if %}\n")
    (folder / "prompts").mkdir()
    file = folder / "recipe.toml"
    file.write_bytes(text) if isinstance(text, bytes) else file.write_text(text)
    try:
        loaded = load_recipe("recipe.toml", overrides=overrides)
    except ProblemsError as error:
        return list(error.problems)
    except RecipeError as error:
        return [Problem(error.message, error.where, error.hint)]
    return check_recipe(loaded, catalogs())


def test_the_sound_recipe_has_no_problem(tmp_path, monkeypatch):
    assert problems_of(tmp_path, SOUND, monkeypatch) == []


def test_a_recipe_may_name_the_column_of_every_role_of_a_training_table(tmp_path, monkeypatch):
    columns = ", ".join(f'{role} = "{role}"' for role in TRAINING)
    named = SOUND.replace('path = "rows.jsonl"', f'path = "rows.jsonl"\ncolumns = {{{columns}}}')
    assert problems_of(tmp_path, named, monkeypatch) == []


# what follows the sound recipe, from its line 9 on (or, behind "=", a whole recipe); message; line or place; hint
BROKEN = [
    # Syntax
    ("[algo]\nname = grpo\n", "not valid TOML", 10, "strings need quotes"),
    ("[rollout]\nallow_filtered_sampling = True\n", "not valid TOML", 10, "write true"),
    ("[algo]\nclip_low = None\n", "not valid TOML", 10, "leave the key out"),
    ('[model]\ndtype = "float32"\n', "not valid TOML: cannot declare", 9, "[model]"),
    ("[train]\nsteps = 1\nsteps = 2\n", "not valid TOML: cannot overwrite", 11, "steps = 2"),
    ("[train\nsteps = 1\n", "not valid TOML", 9, "[train"),
    ('[eval]\nmetric = "reward\n', "not valid TOML", 10, "metric"),
    ("=", "the recipe is empty", "recipe.toml", "vlmrl recipe list"),
    ("= \n\n", "the recipe is empty", "recipe.toml", "vlmrl recipe list"),
    ("[[data]]\npath = 'x/" + "r" * 300 + ".csv'\n", "holds a name of 304 bytes", 10, None),
    # Missing tables
    ('=[[data]]\npath = "rows.jsonl"\n', "the recipe has no [model] table", "recipe.toml:1", "[model]"),
    ('=[model]\npath = "model"\n', "the recipe has no [[data]] table", "recipe.toml:1", "[[data]]"),
    ('=[model]\ndtype = "float32"\n[[data]]\npath = "rows.jsonl"\n', "`model.path` is missing", 1, "Hugging Face"),
    ('=[model]\npath = "model"\n[data]\npath = "rows.jsonl"\n', "`data` is one table", 3, "[[data]]"),
    ('=[model]\npath = ""\n[[data]]\npath = "rows.jsonl"\n', "`model.path` is empty", 2, "folder"),
    # Unknown keys
    ("[rollout]\nsample_per_prompt = 4\n", "unknown key `rollout.sample_per_prompt`", 10, "samples_per_prompt"),
    ("[optimm]\nlr = 1e-5\n", "unknown table `[optimm]`", 9, "did you mean `optim`?"),
    ("[train]\nlr = 1e-5\n", "unknown key `train.lr`", 10, "`optim.lr`"),
    ("[rollout]\nnum_generations = 8\n", "unknown key `rollout.num_generations`", 10, "`rollout.samples_per_prompt`"),
    ('[[data]]\npath = "rows.jsonl"\ntsak = "table"\n', "unknown key `data.1.tsak`", 11, "did you mean `task`?"),
    ("train.stepz = 3\n", "unknown table `[reward.train]`", 9, "write [train] on a line"),
    (SECOND + 'columns = {promt = "q"}\n', "unknown key `data.1.columns.promt`", 12, "did you mean `prompt`?"),
    # Wrong types and ranges
    (
        '[train]\nsteps = "100"\n',
        '`train.steps` is the string "100"; it must be a whole number',
        10,
        "train.steps = 100",
    ),
    ("[train]\nsteps = 1.5\n", "`train.steps` is 1.5; it must be a whole number", 10, None),
    ("[train]\nsteps = true\n", "`train.steps` is true; it must be a whole number", 10, None),
    ("[optim]\nlr = true\n", "`optim.lr` is true; it must be a number", 10, None),
    ("[checkpoint]\nkeep_best = 1\n", "`checkpoint.keep_best` is 1; it must be true or false", 10, "= true"),
    ('[rollout]\nstop = "###"\n', "it must be a list", 10, 'rollout.stop = ["###"]'),
    ("[eval]\nmetric = 3\n", "`eval.metric` is 3; it must be a string", 10, '"3"'),
    (
        '=train = 3\n[model]\npath = "model"\n[[data]]\npath = "rows.jsonl"\n',
        "`train` is 3; it must be a table",
        1,
        "[train]",
    ),
    ("[train]\nsteps = -1\n", "`train.steps` is -1; it must be at least 0", 10, "one new policy version"),
    ("[rollout]\ntop_p = 1.5\n", "`rollout.top_p` is 1.5; it must be at most 1", 10, "Nucleus"),
    ("[optim]\nlr = nan\n", "`optim.lr` is nan; it must be a finite number", 10, None),
    ("[optim]\nlr = inf\n", "`optim.lr` is inf; it must be a finite number", 10, None),
    ("[paper]\nsource = 2024-01-01\n", "`paper.source` is a date", 10, '"2024-01-01"'),
    ("[train]\nseed = 99999999999999999999999999\n", "does not fit in 64 bits", 10, None),
    ('[algo]\ntruncated = "maks"\n', "must be one of 'keep', 'mask' or 'drop'", 10, "did you mean `mask`?"),
    ('[reward.weights]\nformat = "high"\n', '`reward.weights.format` is the string "high"', 10, None),
    ("[paper.notes.deep]\nx = 1\n", "`paper.notes.deep` is a table inside a table inside a table", 9, "use a flat key"),
    (
        "[reward.args.aliases.deep]\nx = 1\n",
        "`reward.args.aliases.deep` is a table inside a table inside a table inside a table",
        9,
        "a string that your function parses",
    ),
    ('[rollout]\nstop = ["a", 3]\n', "`rollout.stop.1` is 3; it must be a string", 10, None),
    # Names that do not exist
    (SECOND + 'task = "digit"\n', "unknown task `digit`", 12, "did you mean `digits`?"),
    (
        SECOND + 'task = "bird"\nvariant = "im_concret"\n',
        "the task `bird` has no variant `im_concret`",
        13,
        "did you mean `im_concrete`?",
    ),
    (SECOND + 'task = "digits"\nvariant = "im"\n', "the task `digits` has no variant `im`", 13, "known: none"),
    (SECOND + 'task = "whale"\nvariant = "im"\n', "the task `whale` has no variant `im`", 13, "known: baseline"),
    (
        '=[model]\npath = "model"\n[[data]]\npath = "rows.jsonl"\ntask = "fungi"\n[reward]\nprofile = "taxonlr"\n',
        "the task `fungi` has no reward profile `taxonlr`",
        7,
        "did you mean `taxonrl`?",
    ),
    (
        '=[model]\npath = "model"\n[[data]]\npath = "rows.jsonl"\ntask = "pairs"\n[reward]\nprofile = "taxonrl"\n',
        "the task `pairs` has no reward profile `taxonrl`",
        7,
        "known: default",
    ),
    (
        'profile = "taxonrl"\n',
        "`reward.profile` (taxonrl) is never used: the recipe names another reward",
        9,
        "leave `name` out",
    ),
    ('[algo]\nname = "gprp"\n', "unknown algorithm `gprp`", 10, "did you mean `grpo`?"),
    ('[algo]\nadvantage = "group_men"\n', "unknown advantage `group_men`", 10, "group_mean"),
    ('[algo]\naggregation = "mean"\n', "unknown aggregation `mean`", 10, "token_mean"),
    (SECOND + 'reward = "exact_mach"\n', "unknown reward `exact_mach`", 12, "did you mean `exact_match`?"),
    # Files that do not exist
    (
        '[[data]]\npath = "row.jsonl"\n',
        "`data.1.path` names a path that does not exist: row.jsonl",
        10,
        "did you mean rows.jsonl?",
    ),
    (SECOND + 'prompt = "ask.jinja"\n', "`data.1.prompt` names a path that does not exist", 12, "Jinja"),
    (SECOND + 'prompt = "broken.jinja"\n', "not valid Jinja", "broken.jinja:2", None),
    (SECOND + 'reward = "rewards/mine.py:score"\n', "a reward file that does not exist", 12, None),
    (SECOND + 'reward = "reward.py:tim"\n', "reward.py has no function `tim`", 12, "reward.py defines: score"),
    (SECOND + 'reward = "reward.py:scor"\n', "reward.py has no function `scor`", 12, "did you mean `score`?"),
    (SECOND + 'reward = "reward.py"\n', "no function in it", 12, "reward.py defines: score"),
    (SECOND + 'reward = "broken.py:score"\n', "not valid Python", "broken.py:1", None),
    ("[reward.args]\nwieght = 2.0\n", "`score` has no argument `wieght`", 10, "did you mean `weight`?"),
    ('=[model]\npath = "./modle"\n' + REST, "`model.path` names a path that does not exist", 2, "did you mean"),
    ('=[model]\npath = "prompts"\n' + REST, "prompts holds no model", 2, "config.json"),
    ('=[model]\npath = "model/config.json"\n' + REST, "must be a folder", 2, 'path = "model"'),
    ('[[data]]\npath = "prompts"\n', "has no dataset.json", 10, "vlmrl prep"),
    ('[[data]]\npath = "reward.py"\n', "this kind of table cannot be read", 10, ".parquet"),
    ('=[model]\npath = "model"\n[[data]]\npath = "rows.jsonl"\n', "has no reward of its own", 3, "file.py:function"),
    # Contradictions
    (
        "[rollout]\ntop_p = 0.9\n",
        "`rollout.top_p` is 0.9: tokens are then not sampled from the policy",
        10,
        "allow_filtered_sampling",
    ),
    ("[rollout]\ntop_k = 50\n", "`rollout.top_k` is 50", 10, "allow_filtered_sampling"),
    ("[algo]\nclip_low = 0.3\nclip_high = 0.2\n", "`algo.clip_high` (0.2) is below `algo.clip_low` (0.3)", 11, "0.28"),
    # The family table
    ('[algo]\nsurrogate = "ppo"\n', "unknown surrogate `ppo`", 10, "clip_cov"),
    ('[algo]\nscale = "std"\n', "unknown scale `std`", 10, "batch"),
    ("[algo]\ncov_share = 0.1\n", "`algo.cov_share` does nothing", 10, "kl_cov"),
    ('[algo]\nname = "gpg"\nclip_low = 0.1\n', "the surrogate of `gpg`", 11, "remove it"),
    ('[algo]\nname = "gpg"\nratio = "token"\n', "has no ratio", 11, "remove"),
    ('[algo]\nkl = "k2"\n', "`algo.kl` does nothing: `algo.kl_coef` is 0", 10, "0.001"),
    ("[algo]\nvalue_clip = 0.1\n", "`algo.value_clip` does nothing", 10, "ppo"),
    ('[algo]\nname = "maye"\ngae_lambda = 0.9\n', "has no critic", 11, "ppo"),
    ('[algo]\nname = "ppo"\nscale = "group"\n', "`algo.scale` group", 11, "tokens"),
    ("[algo]\npower_positive = 1.0\n", "`algo.power_positive` does nothing", 10, "vespo"),
    ("[algo]\ngamma = 0.9\n", "compares whole scores", 10, "otb"),
    (
        '[algo]\nname = "otb"\n[rollout]\nsamples_per_prompt = 1\n',
        "`otb` compares the samples of one prompt",
        12,
        "2 or more",
    ),
    (
        '[environment]\nname = "reward.py:score"\nturns = 1\n',
        "the model never sees what a tool returns",
        11,
        "Observation.done",
    ),
    ('[algo]\nkl = "k1"\nkl_coef = 0.1\n', "expected gradient is zero", 10, "reward"),
    ('[algo]\nname = "gdpo"\nkl_in = "reward"\nkl_coef = 0.1\n', "each part is normalised alone", 11, "loss"),
    ("[algo]\nkl_coef = 0.1\nkl_horizon = 9.0\n", "`algo.kl_horizon` does nothing", 11, "kl_target"),
    ('[algo]\nname = "gdpo"\noverlong_tokens = 9\n', "uses the reward's parts", 11, "part"),
    ('[algo]\nname="gdpo"\nfilter="spread"\nmin_spread=0.1\n', "`algo.min_spread`", 12, "leave"),
    ("[algo]\noverlong_tokens = 9999\n", "more than `rollout.max_new_tokens`", 10, "fifth"),
    ("[algo]\noverlong_penalty = 0.5\n", "`algo.overlong_penalty` does nothing", 10, "overlong"),
    ('[algo]\nname = "maye"\ntruncated = "mask"\n', "`algo.truncated_score`", 11, "keep"),
    ("[algo]\nfilter_tries = 3\n", "`algo.filter_tries` does nothing", 10, "spread"),
    (
        '[algo]\nname = "remax"\nfilter = "spread"\n[rollout]\nsamples_per_prompt = 1\n',
        "refuses every prompt",
        11,
        "more samples",
    ),
    (
        '[algo]\nimportance = "mask"\n[rollout]\ntop_p = 0.9\nallow_filtered_sampling = true\n',
        "is not valid with top_p",
        10,
        "leave top_p",
    ),
    ('[algo]\nimportance = "ratio"\nimportance_level = "token"\n', "`algo.importance_level` does", 11, "rem"),
    ('[algo]\nname = "rloo"\nimportance = "ratio"\n', "needs a ratio that is", 11, "mask"),
    ('[algo]\nimportance = "none"\nimportance_cap = 3.0\n', "`algo.importance_cap` does", 11, "remove"),
    ('[algo]\nadvantage = "group_mean_std"\nscale = "batch"\n', "divides by the group's std", 11, "group_mean"),
    ("[algo]\ngamma = 0.9\n", "`algo.gamma` does nothing", 10, "reinforce++"),
    ('[algo]\nname = "clip_cov"\ncov_low = 7.0\n', "is not below `algo.cov_high`", 11, "1 and 5"),
    ('[algo]\nname = "gpg"\n[train]\nupdates_per_step = 2\n', "has no ratio", 12, "clip"),
    (
        '=[model]\npath = "model"\nmin_pixels = 5000\nmax_pixels = 4000\n' + REST,
        "is above `model.max_pixels`",
        3,
        "min <= max",
    ),
    (
        '=[model]\npath = "model"\nfreeze = ["vision", "connector", "language", "embeddings"]\n' + REST,
        "nothing is left to train",
        3,
        "leave out",
    ),
    (
        '=[model]\npath = "model"\nfreeze = ["language"]\n[lora]\nrank = 8\n' + REST,
        "names every part that would get an adapter (language)",
        3,
        "leave language out",
    ),
    (
        '=[model]\npath = "model"\nfreeze = ["vision", "connector"]\n[lora]\nrank = 8\nvision = true\n' + REST,
        "`lora.vision` adds adapters",
        6,
        "remove one of the two",
    ),
    ("[lora]\nrank = 8\ndropout = 0.1\n", "`lora.dropout` is 0.1", 11, "leave dropout out"),
    ("[lora]\nalpha = 8\n", "`lora.rank` is missing", 9, "`rank`"),
    (
        '=[model]\npath = "model"\ngradient_checkpointing = "visoin"\n' + REST,
        '`model.gradient_checkpointing` is the string "visoin"',
        3,
        "did you mean `vision`?",
    ),
    (
        '=[model]\npath = "model"\ngradient_checkpointing = 1.5\n' + REST,
        '`model.gradient_checkpointing` is 1.5; it must be true or false, "auto", "vision" or a number less than 1',
        3,
        "a number between 0 and 1",
    ),
    (
        '=[model]\npath = "model"\ngradient_checkpointing = 0.0\n' + REST,
        '`model.gradient_checkpointing` is 0.0; it must be true or false, "auto", "vision" or a number greater than 0',
        3,
        "a number between 0 and 1",
    ),
    (
        '=[model]\npath = "model"\ngradient_checkpointing = 1\n' + REST,
        "`model.gradient_checkpointing` is 1; it must be true or false, ",
        3,
        "write model.gradient_checkpointing = true",
    ),
    ("[lora]\nrank = 8\ntargets = []\n", "`lora.targets` is empty", 11, "all-linear"),
    ('[lora]\nrank = 8\ntargets = "q_proj"\n', "`lora.targets` is", 11, 'targets = ["q_proj"]'),
    ('[lora]\nrank = 8\ntargets = ["all-linear"]\n', "is not the name of a", 11, '"all-linear"'),
    ("[lora]\nrank = 8\n[optim]\nlr = 1e-6\n", "an adapter hardly changes", 12, "1e-5"),
    (
        '=[model]\npath = "model"\nfreeze = ["vision"]\n[lora]\nrank = 8\n' + REST,
        "of vision changes nothing",
        3,
        "remove it",
    ),
    ('[lora]\nrank = 8\nexclude = ["*"]\n', "leaves no layer", 11, "remove it"),
    ('=[model]\npath = "model"\nquantize = "4bit"\n' + REST, "cannot be trained", 3, "[lora]"),
    (
        '=[model]\npath = "model"\ndtype = "float32"\n[optim]\nname = "adamw_bf16_kahan"\n' + REST,
        "holds bfloat16 weights, but `model.dtype` is float32",
        5,
        "bfloat16",
    ),
    ("[rollout]\nsamples_per_prompt = 1\n", "every advantage is 0", 10, "8 is the default"),
    (
        "[rollout]\nprompts_per_step = 2\n[train]\nupdates_per_step = 4\n",
        "an update needs at least one prompt",
        12,
        "at most 2",
    ),
    ("[train]\nsteps = 5\n[optim]\nwarmup_steps = 10\n", "leaves no step", 12, "below train.steps"),
    (SECOND + 'validation = "test"\n', "chooses checkpoints on the test split", 12, "allow_test_split"),
    (SECOND + 'split = "test"\n', "trains on the test split", 12, "allow_test_split"),
    (SECOND + 'validation = "train"\n', "validates on the split it trains on", 12, None),
    ('[[data]]\npath = "rows.jsonl"\n', "2 data sources are called", 10, "`name` of its own"),
    ('[[data]]\npath = "rows.jsonl"\nname = "my data"\n', "`my data` cannot name a data source", 11, "letters"),
    ("weights = {format = 0.0, answer = 0}\n", "every weight in `reward.weights` is 0", 9, None),
    ('[eval]\nmetric = "brier"\n', "better when lower", 10, 'eval.goal = "min"'),
    ("[eval]\nevery_steps = 0\npatience = 3\n", "no validation is counted", 11, "eval.every_steps"),
    ('[rollout]\nstop = [""]\n', "end every response at once", 10, None),
    ("[rollout]\nbatch_tokens = 256\n", "cannot hold one prompt", 10, "batch_tokens"),
    ("[optim]\nmin_lr_ratio = 0.1\n", "does nothing with a constant schedule", 10, "cosine"),
    ("[train]\nrows_per_step = 8\n", "`train.rows_per_step` does nothing in `vlmrl train`", 10, "remove it"),
    ("[paper.numbers]\naccuracy = 0.9\n", "does not name their source", 9, "source"),
    (
        "[[data]]\npath = 'x.jsonl'\nvalidation = 1.5\n",
        "`data.1.validation` is 1.5; it must be a number less than 1 or a string",
        11,
        "a share of the rows such as 0.1",
    ),
    # Parents
    ('=extends = "bass.toml"\n' + SOUND, "`extends` names bass.toml", 1, "relative to the folder"),
    ("=extends = 3\n" + SOUND, "`extends` must be the path of one recipe", 1, "base/tiny.toml"),
    ('=extends = "recipe.toml"\n' + SOUND, "extends itself", 1, None),
]


@pytest.mark.parametrize(("text", "message", "where", "hint"), BROKEN, ids=[message for _, message, *_ in BROKEN])
def test_a_broken_recipe_is_told_what_is_wrong_where_and_what_to_do(tmp_path, monkeypatch, text, message, where, hint):
    found = problems_of(tmp_path, text[1:] if text.startswith("=") else SOUND + text, monkeypatch)
    assert any(message in p.message for p in found), found
    problem = next(p for p in found if message in p.message)
    assert problem.where == (f"recipe.toml:{where}" if isinstance(where, int) else where)
    if hint is not None:
        assert problem.hint is not None and hint in problem.hint
    assert (
        problem.message[0].islower()
        or problem.message[0] in "`0123456789"
        or problem.message.startswith(("broken", "reward"))
    )


def test_all_problems_come_at_once_in_the_order_of_the_lines(tmp_path, monkeypatch):
    text = SOUND + '[train]\nsteps = "a"\nsede = 3\n[rollout]\ntop_p = 2\ntemperature = nan\n[trian]\n'
    found = problems_of(tmp_path, text, monkeypatch)
    assert [p.where for p in found] == [f"recipe.toml:{n}" for n in (10, 11, 13, 14, 15)]


def test_binary_and_foreign_encodings_are_refused_with_the_line(tmp_path, monkeypatch):
    (found,) = problems_of(tmp_path, b"\x00\x01", monkeypatch)
    assert "binary" in found.message
    (tmp_path / "latin").mkdir()
    (found,) = problems_of(tmp_path / "latin", SOUND.encode() + b"# caf\xe9\n", monkeypatch)
    assert (found.message, found.where) == ("byte 0xe9 is not UTF-8", "recipe.toml:9")


def test_a_file_of_two_megabytes_is_not_read(tmp_path, monkeypatch):
    (found,) = problems_of(tmp_path, b"#" * (2 << 20), monkeypatch)
    assert "a recipe has at most 1,048,576" in found.message


def test_nesting_without_end_is_an_error_not_a_crash(tmp_path, monkeypatch):
    (found,) = problems_of(tmp_path, "x = " + "[" * 100_000, monkeypatch)
    assert "nested too deeply" in found.message


def test_a_byte_order_mark_and_windows_line_ends_are_fine(tmp_path, monkeypatch):
    text = b"\xef\xbb\xbf" + (SOUND + "[train]\nsteps = 0\n").replace("\n", "\r\n").encode()
    (found,) = problems_of(tmp_path, text, monkeypatch)
    assert found.where == "recipe.toml:10"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algo.clip_hgh=0.3", "unknown key `algo.clip_hgh`"),
        ("train.steps", "needs a key and a value"),
        ("=3", "`` is not a key"),
        ("train..steps=3", "`train..steps` is not a key"),
        ("train.steps=many", '`train.steps` is the string "many"; it must be a whole number'),
        ("data.7.path=x", "`7` is not a position in the list `data`"),
        ("data.path=x", "`path` is not a position in the list `data`"),
        ("model.path.x=1", "`model.path` is a single value, not a table"),
        ('rollout.stop=["a"', "is not a complete TOML string, list or table"),
        ("train.steps=1\ntrain.seed=2", "it must be a whole number"),
    ],
)
def test_a_broken_override_names_itself(tmp_path, monkeypatch, override, message):
    (found,) = problems_of(tmp_path, SOUND, monkeypatch, (override,))
    assert message in found.message
    assert found.where == f"--set {override}"


@pytest.mark.parametrize(
    ("override", "advised"),
    [
        ("data.validation=0.1", "--set data.0.validation=..."),
        ("data.cutof=9", "known keys in [[data]]: path, "),
        ("data.cutoff_len=9", "`rollout.max_prompt_tokens`"),
        ("data.7.path=x", "--set data.0.path=..."),
        ("validation=0.1", "`data.0.validation`"),
    ],
)
def test_a_key_of_a_source_is_advised_as_it_can_be_set(tmp_path, monkeypatch, override, advised):
    (found,) = problems_of(tmp_path, SOUND, monkeypatch, (override,))
    assert advised in (found.hint or "")


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("train.save_steps=9", "`checkpoint.every_steps`"),
        ("train.gradient_accumulation_steps=8", "`rollout.prompts_per_step` or, in sft, `train.rows_per_step`"),
        ("per_device_train_batch_size=8", "`rollout.prompts_per_step` or, in sft, `train.rows_per_step`"),
        ("lora.r=8", "`lora.rank`"),
        ("model.bf16=true", "`model.dtype`"),
    ],
)
def test_a_key_of_another_tool_is_named_though_another_key_is_similar(tmp_path, monkeypatch, override, key):
    found = problems_of(tmp_path, SOUND, monkeypatch, (override,))
    assert [key in (p.hint or "") for p in found if p.message.startswith("unknown key")] == [True]


def test_every_key_that_a_name_of_another_tool_stands_for_exists():
    for key in (*FOREIGN_KEYS.values(), *IN_SFT.values()):
        assert field_at(Recipe, tuple(key.split("."))) is not None, key


def test_a_key_of_a_source_that_only_reinforcement_reads_is_no_advice_to_choose_an_algorithm(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text("{}")
    (found,) = problems_of(tmp_path, SOUND, monkeypatch, ("kind=sft", "data.0.demonstrations=a.jsonl"))
    assert found.message == "`data.0.demonstrations` does nothing in `vlmrl sft`" and found.hint == "remove it"
