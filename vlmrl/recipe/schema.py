"""What a user may write in a recipe: one class a TOML table, strict. The string under a key is its help.

`vlmrl recipe explain KEY` prints that help with type, default and range; `vlmrl recipe schema` prints JSON Schema.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from vlmrl.recipe.algo_table import Algo
from vlmrl.recipe.table import (
    MOST,
    Count,
    Fraction,
    Log,
    NotNegative,
    Number,
    Pixels,
    Positive,
    PositiveFraction,
    PositiveInt,
    RecipeTable,
    Seconds,
    Share,
    Tokens,
)


class Model(RecipeTable):
    """Which model is trained and how its inputs are made."""

    path: str = Field(min_length=1)
    """A local Hugging Face folder, a hub name, or a run (`runs/<id>`, its name or `last`): its best or last
    checkpoint."""
    revision: str | None = None
    """Hub revision (branch, tag or commit) when `path` is a hub name."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the forward and backward arithmetic; master weights and optimizer state are always float32. auto =
    bfloat16 on a GPU, float32 on a CPU; chosen when a run begins, and kept when it goes on."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto = a GPU when there is one."""
    min_pixels: Pixels = 3136
    """Smallest image area after resizing, in pixels; smaller images are enlarged. Never silent: `check` counts them.
    Processors without a grid of patches (Gemma, InternVL, Idefics, MiniCPM-V) have no such bounds: `check` says so."""
    max_pixels: Pixels = 1_003_520
    """Largest image area after resizing, in pixels (about one megapixel); larger ones are shrunk and counted
    by `check`. As `min_pixels`, for processors with a grid of patches."""
    freeze: list[Literal["vision", "connector", "language", "embeddings"]] = []
    """Parts that are not trained: vision (the tower), connector (its merger or projector), language, embeddings (with
    the head). A name that this model has no part for is an error."""
    quantize: Literal["4bit"] | None = None
    """Hold the language model's frozen weights in 4 bits (NF4, bitsandbytes): QLoRA. Needs a `[lora]` table."""
    thinking: Literal["off", "on", "template"] = "template"
    """The chat template's `enable_thinking`: off, on, or not passed to it (template)."""
    gradient_checkpointing: bool | Literal["vision"] = False
    """Recompute activations in the backward pass: less memory, about a third more time. "vision" = of the vision tower
    alone, which costs little where a prompt's images run once for all its responses."""
    shared_prefix: bool = True
    """Run the prompt of a group once for all its responses, where the model's family can (exact; `check --deep` proves
    it on your rows). false = each response behind its own copy of the prompt, the slow reference."""
    trust_remote_code: bool = False
    """Run Python code that the model's repository ships. Only for repositories you trust."""


class Lora(RecipeTable):
    """Train a low-rank adapter (LoRA) and nothing else. Without this table the weights themselves are trained."""

    rank: Annotated[int, Field(gt=0, le=65_536)]
    """Rank of the adapter's two factors; 16 to 64 is usual. Memory and file size grow with it."""
    alpha: PositiveInt = 32
    """The adapter's output is scaled by alpha / rank (with `rslora`: alpha / sqrt(rank))."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout before the adapter, in `vlmrl sft` only: sampling and training must be the same function in RL."""
    targets: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = "all-linear"
    """Which linear layers get an adapter: "all-linear", or the last parts of their names (`["q_proj", "v_proj"]`)."""
    exclude: list[str] = []
    """Layers left out, as shell patterns over full names (`["*.layers.0.*", "*.o_proj"]`); each must match one."""
    vision: bool = False
    """Also the linear layers of the vision tower and the connector; otherwise the language model's only."""
    rslora: bool = False
    """Rank-stabilised scaling, alpha / sqrt(rank) (arXiv:2312.03732)."""
    dora: bool = False
    """Weight-decomposed adapter, DoRA (arXiv:2402.09353): a trained magnitude a row; slower."""


class Data(RecipeTable):
    """One source of rows. A recipe lists one or more `[[data]]` entries; a run mixes them by `share`."""

    path: str = Field(min_length=1)
    """A dataset folder made by `vlmrl prep`; a .parquet, .jsonl, .json or .csv file; or `hub:<name>`
    (`#config` if any)."""
    name: str | None = None
    """Short name in metrics and rollouts; default: the last part of `path`."""
    task: str = "table"
    """Which task renders and scores the rows: a name (`vlmrl recipe list --tasks`), or a function of your own that
    returns a `vlmrl.Task`, as path/to/file.py:function. It runs in the trainer's process, as part of it."""
    variant: str | None = None
    """How much the task asks for (`vlmrl recipe list --tasks` names its variants; im = its main one with intermediate
    steps); default: im, or baseline where the dataset lacks the truth for it."""
    share: Share = 1.0
    """Relative share of the prompts of each step that come from this source."""
    split: str = "train"
    """Split that training draws from."""
    validation: str | None = None
    """Where validation rows are: a split name, or a file; default: the split `validation` when the source has one."""
    prompt: str | None = None
    """Jinja template file of the user message (columns are its variables, `<image>` marks an image); default:
    the task's."""
    system: str | None = None
    """System message, as text."""
    reward: str | None = None
    """Reward of this source: a built-in name or `path/to/file.py:function`; default: `[reward] name`, else the
    task's."""
    images_root: str | None = None
    """Folder that relative image paths are looked up in; paths that leave it are refused. Default: the table's
    folder."""
    columns: dict[str, str] = {}
    """Names of this table's columns when not recognised: keys prompt, images, answer, response; values as in
    the file."""
    max_rows: PositiveInt | None = None
    """Use only the first rows of the split."""


class Reward(RecipeTable):
    """How a response becomes a number."""

    name: str | None = None
    """A built-in reward or `path/to/file.py:function`; default: the task's own."""
    profile: str = "default"
    """Which of the task's own rewards, where `name` gives none: default, or another that the task has
    (`vlmrl recipe list --tasks` names them)."""
    style: Literal["auto", "vlmrl", "trl", "verl", "easyr1"] = "auto"
    """Calling convention of a `file.py:function`; auto reads it from the parameter names."""
    args: dict[str, Any] = {}
    """Keyword arguments bound to the reward once, so that a misspelt one fails at load. They go over those that the
    task binds to its own reward; a table, such as `aliases = {Silverbeck = "Silverback"}`, adds to the task's."""
    weights: dict[str, Number] = {}
    """Weight of each part, used as given (not normalised); default: the reward's own."""
    accuracy: str | None = None
    """Which part says whether a response is right: the metric `accuracy`. It needs no weight. Default: the task's own
    measure, else the part `accuracy`, `acc` or `correct`."""
    timeout_seconds: Annotated[float, Field(ge=1e-3, le=3600)] = 10.0
    """Wall clock for one call of a user's reward; it runs in a worker process that is ended when the time is over."""
    memory_mb: Annotated[int, Field(ge=128, le=MOST)] = 4096
    """Address-space limit of one reward worker, in MiB."""
    workers: Annotated[int, Field(gt=0, le=4096)] = 1
    """Worker processes for a user's reward."""
    on_timeout: dict[str, Number] = {}
    """Parts of the score of a response that hangs or kills a user's reward twice, the second time alone, such as
    `{ answer = 0.0 }`. Left out = ON_TIMEOUT of the reward's file; without one, such a response has no score, like any
    on which the reward fails."""
    on_unavailable: Literal["mask", "stop"] = "mask"
    """Action of training when a reward raises `vlmrl.RewardUnavailable`, because a service that it needs is down: mask
    = the samples are left out and counted in `reward/unavailable`; stop = a checkpoint is saved and the run ends. In
    the first 3 steps the run always ends."""


class Rollout(RecipeTable):
    """How responses are sampled."""

    engine: Literal["auto", "torch", "vllm"] = "auto"
    """Which engine generates in `train` and `eval`: torch, the built-in one, or vllm, with weights of its own, synced
    every step. auto = vllm on a GPU where it is installed and knows the model, else torch; chosen when a run begins,
    and kept when it goes on. All else (`sft`, `try`, `check --deep`) uses the built-in one."""
    kv_cache_gib: Annotated[float, Field(ge=1e-3, le=1e6)] | None = None
    """Memory of vLLM's key-value cache on each GPU that it is on, in GiB. Left out = what the responses of a step need
    at once, as far as memory is free; `check` shows it."""
    engine_gpus: Count = 0
    """With vllm: so many of the GPUs of `--gpus`, the last ones, generate and the others train. 0 = each GPU does
    both in turn, in the trainer's process."""
    tensor_parallel: PositiveInt = 1
    """With vllm: parts that every weight of an engine is cut into, each on a GPU of its own, for models that are too
    large for one GPU. The engine then serves as many processes as it has parts, on their GPUs, or, with
    `engine_gpus`, takes so many of those."""
    overlap: bool = False
    """With `engine_gpus`: the next step's rollouts are made while this step's update runs, so by weights that are one
    step older. `algo.importance` makes up for it; as auto it takes the engine's log-probs for the old ones."""
    max_sync_gap: Positive = 0.1
    """After each weight sync the trainer re-scores a few responses of every vLLM engine. The run stops when the median
    difference of the tokens' log-probs (nats) is above this, over all engines or of one that has 8 tokens or more. A
    single token may differ by more. In float32 the median is below 1e-5, in bfloat16 about 0.01."""
    prompts_per_step: Annotated[int, Field(gt=0, le=1_000_000)] = 32
    """Different prompts in one step."""
    samples_per_prompt: Annotated[int, Field(gt=0, le=1_000_000)] = 8
    """Responses per prompt (the group size n)."""
    max_new_tokens: Tokens = 512
    """Token limit of one response, end token included."""
    max_prompt_tokens: Tokens = 4096
    """Rows whose prompt is longer (image tokens counted) are an error in `check`; nothing is cut."""
    temperature: Annotated[float, Field(ge=1e-3, le=1e3)] = 1.0
    """Sampling temperature; it is part of the policy: log-probs are those of softmax(logits / temperature)."""
    top_p: PositiveFraction = 1.0
    """Nucleus sampling; below 1 the importance correction does not hold, so `allow_filtered_sampling` must be set."""
    top_k: Count = 0
    """Sample among the k most likely tokens; 0 = off; see `top_p`."""
    allow_filtered_sampling: bool = False
    """Allow training with top_p < 1 or top_k > 0."""
    batch_tokens: Tokens = 65_536
    """Most tokens (prompt and response) the built-in engine holds in its key-value cache at once."""
    stop: list[str] = []
    """Strings that end a response when they appear; kept in the text."""


class Train(RecipeTable):
    """The length and the batching of a run."""

    steps: Count = 100
    """Training steps; one step = one new policy version. `epochs` may say it instead (then 0 stands here until a run
    begins)."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of everything random: data order, sampling, initialisation."""
    rows_per_step: Annotated[int, Field(gt=0, le=1_000_000)] = 32
    """Rows in one step of `vlmrl sft`."""
    updates_per_step: PositiveInt = 1
    """Optimizer updates made from one batch of rollouts."""
    tokens_per_row: Tokens = 4096
    """Token budget of one packed row of a microbatch; memory grows with it, results do not depend on it."""
    rehearsal: bool = True
    """Before the first step, run the largest row that the data can make forward and backward, and change nothing: a run
    that does not fit in memory ends then, with the key to change. false = find out in the middle of the run."""
    stop_above: Number | None = None
    """Stop early when the validation metric (`eval.metric`) reaches this value."""
    max_seconds: PositiveInt | None = None
    """Stop after this many seconds of training (a last checkpoint is saved)."""
    epochs: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Passes over the data, in place of `steps`: a run has as many steps as it takes to draw that many times as many
    rows as all sources have together. Counted when a run begins, and kept when it goes on. With one source every row is
    drawn that often; `share` can make a pass over one source longer than over another. Prompts that a filter replaces
    do not count."""


class Optim(RecipeTable):
    """AdamW."""

    name: Literal["adamw", "adamw_8bit", "adamw_bf16_kahan"] = "adamw"
    """adamw: float32 masters, fused; adamw_8bit: its moments in 8 bits (bitsandbytes); adamw_bf16_kahan:
    bfloat16 weights without masters, what rounding loses carried to the next update (Kahan)."""
    lr: Annotated[float, Field(ge=1e-12, le=1e3)] = 1e-6
    """Peak learning rate; where the recipe has a `[lora]` table and gives none, 1e-5."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up; linear and cosine fall to `min_lr_ratio` at the last step."""
    warmup_steps: Count = 0
    """Steps of linear warm-up; the first step already has lr / warmup_steps, never 0."""
    min_lr_ratio: Fraction = 0.0
    """Final learning rate as a share of `lr`."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay, on matrices only."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW beta1."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """AdamW beta2."""
    max_grad_norm: Annotated[float, Field(ge=1e-9, le=1e12)] = 1.0
    """Gradients are scaled down to this norm."""
    warmup_ratio: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the steps that is warm-up, in place of `warmup_steps`, rounded up to whole steps. Counted when a run
    begins, and kept when it goes on."""


class Eval(RecipeTable):
    """Validation during training. Greedy."""

    every_steps: Count = 10
    """Steps between validations; 0 = only at the start and at the end."""
    max_rows: PositiveInt | None = None
    """Use the first rows of the validation split only."""
    metric: str = "reward"
    """Metric that names the best checkpoint: reward, accuracy, or any key of the evaluation summary."""
    goal: Literal["max", "min"] = "max"
    """Whether the metric should rise or fall."""
    patience: PositiveInt | None = None
    """Stop when the metric has not improved for this many validations."""
    max_new_tokens: Tokens | None = None
    """Token limit in validation; default: rollout.max_new_tokens."""
    allow_test_split: bool = False
    """Validate on a split called test. The run is then labelled so in its manifest and in every report."""
    enabled: bool = True
    """false = no validation, although there are rows for it: no best checkpoint, no early stop."""
    at_start: bool = True
    """Validate before the first step too; false = the first validation is that of `every_steps`, or the last one."""


class Checkpoint(RecipeTable):
    """When to save and what to keep."""

    every_steps: Count = 50
    """Steps between checkpoints; 0 = only the last (and one when interrupted)."""
    keep_last: PositiveInt = 2
    """Newest checkpoints to keep; the best one is kept besides. Old ones go only after the new one is complete."""
    keep_best: bool = True
    """Keep the checkpoint of the best validation."""
    asynchronous: bool | None = None
    """Write checkpoints while training goes on, from a copy of weights and moments in main memory, which stays taken;
    the step loop waits for the copying alone. One at a time. Left out = on a GPU."""


class Parallel(RecipeTable):
    """Several processes, started with `--gpus`."""

    timeout_seconds: Seconds = 1800.0
    """Longest time that a process may be in one phase of a step (sampling, updating, saving ...). After it the run is
    ended, with the process and the phase named and the stacks of all in their logs."""
    shard_size: PositiveInt | None = None
    """Processes that hold one whole copy of the model between them, a divisor of their number: 8 with 32 keeps the
    gathering of weights within each machine of 8, and only gradients travel between them. Left out = all of them."""
    offload: bool = False
    """Keep parameters, gradients and moments in main memory between their uses: slower, for models that do not fit."""


class Recipe(RecipeTable):
    """A whole recipe: the arguments of one run."""

    kind: Literal["rl", "sft"] = "rl"
    """What the recipe is for: `vlmrl train` (rl) or `vlmrl sft` (sft)."""
    model: Model
    lora: Lora | None = None
    data: list[Data] = Field(min_length=1)
    reward: Reward = Reward()
    algo: Algo = Algo()
    rollout: Rollout = Rollout()
    train: Train = Train()
    optim: Optim = Optim()
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    parallel: Parallel = Parallel()
    log: Log = Log()
    paper: dict[str, Any] = {}
    """Published numbers (`[paper.numbers]`) and their `source`, shown beside yours by eval and report."""
