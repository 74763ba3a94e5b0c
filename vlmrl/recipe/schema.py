"""Schema of a recipe: one strict class per TOML table. The string under a key is its help text.

`vlmrl recipe explain KEY` prints that help with type, default and range; `vlmrl recipe schema` prints JSON Schema.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, model_validator

from vlmrl.algo.algorithms import ALGORITHMS
from vlmrl.key_facts import MOST
from vlmrl.recipe.tables import (
    ADAPTER,
    AUTO,
    CADENCE,
    ENDING,
    ENVIRONMENT,
    FILE,
    FILE_OR_NAME,
    LENGTH,
    LIMIT,
    MEASURE,
    MOVED,
    ORDER,
    PROMPT,
    REWARD,
    RL_ONLY,
    ROWS,
    RUN_KIND,
    SAMPLING,
    SFT_ONLY,
    SOURCES,
    SPEED,
    TEACHING,
    TRAINED_PARTS,
    UPDATE,
    WEIGHT_TYPE,
    WEIGHTS,
    Algo,
    Count,
    Eval,
    Fraction,
    Judge,
    ListedReward,
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
    """The model to train, and how its inputs are prepared."""

    path: Annotated[str, WEIGHTS, FILE] = Field(min_length=1)
    """A local Hugging Face folder, a hub name, or a run (`runs/<id>`, its name or `last`): its best or last
    checkpoint."""
    revision: Annotated[str | None, WEIGHTS] = None
    """Hub revision (branch, tag or commit) when `path` is a hub name."""
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], WEIGHT_TYPE] = "auto"
    """Type of the forward and backward arithmetic; master weights and optimizer state are always float32. auto =
    bfloat16 on a GPU, float32 on a CPU; chosen when a run begins, and kept on resume."""
    device: Annotated[Literal["auto", "cpu", "cuda"], SPEED] = "auto"
    """Device to run on; auto = a GPU if there is one."""
    min_pixels: Annotated[Pixels, PROMPT] = 3136
    """Smallest image area after resizing, in pixels; smaller images are enlarged, and `check` counts them. Processors
    without a grid of patches (Gemma, InternVL, Idefics, MiniCPM-V) have no such bounds: `check` says so."""
    max_pixels: Annotated[Pixels, PROMPT] = 1_003_520
    """Largest image area after resizing, in pixels (about one megapixel); larger images are shrunk, and `check` counts
    them. Like `min_pixels`, only for processors with a grid of patches."""
    freeze: Annotated[list[Literal["vision", "connector", "language", "embeddings"]], TRAINED_PARTS] = []
    """Parts that are not trained: vision (the tower), connector (its merger or projector), language, embeddings (with
    the head). A part that this model does not have is an error."""
    quantize: Annotated[Literal["4bit"] | None, ADAPTER] = None
    """Hold the language model's frozen weights in 4 bits (NF4, bitsandbytes): QLoRA. Needs a `[lora]` table."""
    thinking: Annotated[Literal["off", "on", "template"], PROMPT] = "template"
    """Value of `enable_thinking` for the chat template: on or off; template = it is not passed."""
    gradient_checkpointing: Annotated[bool | Literal["auto", "vision"] | Annotated[float, Field(gt=0, lt=1)], SPEED] = (
        "auto"
    )
    """Recompute activations in the backward pass: less memory, up to a third more time, the same numbers. true = in all
    layers; "vision" = only in the vision tower, which costs little if a prompt's images run once for all its responses;
    a number between 0 and 1 = in the vision tower and in this share of the text model's layers. auto = false on a CPU,
    on a GPU the least of these that fits by the memory plan; chosen when a run begins, and kept on resume."""
    compile: Annotated[bool | Literal["auto"], SPEED] = False
    """Compile the text layers and vision blocks (torch.compile) for training: fewer passes over memory, the same
    numbers up to rounding, and a longer first step. Not measured on a GPU yet; on a CPU 4% to 9% faster. auto = true on
    a GPU where packed rows run in half precision without bidirectional images, else false; chosen when a run begins,
    and kept on resume."""
    attention: Annotated[Literal["auto", "fa3", "fa4"], SPEED] = "auto"
    """Kernels of flash attention on a GPU, where it runs packed rows or images: fa3 = FlashAttention 3 (the module
    flash_attn_interface, for Hopper), fa4 = flash-attn-4 (for Hopper and Blackwell). auto = flash-attn 2 if it is
    installed, else torch's own; never fa3 or fa4, because vlmrl has not run with them on a GPU yet."""
    shared_prefix: Annotated[bool, SPEED] = True
    """Run the prompt of a group once for all its responses, if the model's family supports it (exact; `check --deep`
    proves it on your rows). false = each response has its own copy of the prompt: the slow reference."""
    trust_remote_code: Annotated[bool, LIMIT] = False
    """Run Python code that the model's repository ships. Only for repositories you trust."""


class Lora(RecipeTable):
    """Low-rank adapter (LoRA): it alone is trained. Without this table the weights themselves are trained."""

    rank: Annotated[int, Field(gt=0, le=65_536), ADAPTER]
    """Rank of the adapter's two factors; 16 to 64 is usual. Memory and file size grow with it."""
    alpha: Annotated[PositiveInt, ADAPTER] = 32
    """The adapter's output is scaled by alpha / rank (with `rslora`: alpha / sqrt(rank))."""
    dropout: Annotated[float, Field(ge=0, lt=1), UPDATE] = 0.0
    """Dropout before the adapter, in `vlmrl sft` only: in RL, sampling and training must use the same function."""
    targets: Annotated[Literal["all-linear"] | Annotated[list[str], Field(min_length=1)], ADAPTER] = "all-linear"
    """Linear layers that get an adapter: "all-linear", or the last parts of their names (`["q_proj", "v_proj"]`)."""
    exclude: Annotated[list[str], ADAPTER] = []
    """Layers left out, as shell patterns over full names (`["*.layers.0.*", "*.o_proj"]`); each must match one."""
    vision: Annotated[bool, ADAPTER] = False
    """Adapters also for the linear layers of the vision tower and the connector; false = only for the language
    model."""
    rslora: Annotated[bool, ADAPTER] = False
    """Rank-stabilised scaling, alpha / sqrt(rank) (arXiv:2312.03732)."""
    dora: Annotated[bool, ADAPTER] = False
    """Weight-decomposed adapter, DoRA (arXiv:2402.09353): one trained magnitude per row of a weight; slower."""


class Teacher(RecipeTable):
    """Frozen model that the policy learns from (`algo.teacher`), on responses of the policy."""

    path: Annotated[str, TEACHING, FILE, RL_ONLY] = Field(min_length=1)
    """A local Hugging Face folder, a hub name, or a run: of any size and family that has the model's tokenizer. It
    reads the rows through its own processor and chat template. start = the weights that this run began with, which
    teach something only if they read more: see `reveal`."""
    checkpoint: Annotated[str, TEACHING] = AUTO
    """Checkpoint that `path` means. It is chosen when a run begins, and kept on resume: not to be set. For another one,
    `path` is RUN@last or RUN@40."""
    revision: Annotated[str | None, TEACHING] = None
    """Hub revision (branch, tag or commit) when `path` is a hub name."""
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], TEACHING] = "auto"
    """Type of its arithmetic and weights; auto = that of the model."""
    min_pixels: Annotated[Pixels | None, TEACHING] = None
    """Smallest image area for the teacher, in pixels; default: `model.min_pixels`."""
    max_pixels: Annotated[Pixels | None, TEACHING] = None
    """Largest image area for the teacher, in pixels; default: `model.max_pixels`."""
    thinking: Annotated[Literal["off", "on", "template"] | None, TEACHING] = None
    """Value of `enable_thinking` for the teacher's chat template, as in `model.thinking`; default: the model's."""
    temperature: Annotated[Positive | None, TEACHING] = None
    """Divisor of the teacher's logits; default: `rollout.temperature`, by which the policy samples and is trained."""
    reveal: Annotated[str | None, TEACHING] = None
    """Text that the teacher alone reads, behind the prompt's last message: a Jinja template whose variables are the
    row's columns and `truth`, such as "The right answer is {{ truth.answer }}."."""
    control: Annotated[bool, TEACHING] = False
    """Show the text of `reveal` with every value hidden: the control, which tells what the values are worth."""
    trust_remote_code: Annotated[bool, LIMIT] = False
    """Run Python code that the teacher's repository ships. Only for repositories you trust."""

    @property
    def is_start(self) -> bool:
        """Return whether the teacher is the policy as the run began."""
        return self.path == "start"


class Data(RecipeTable):
    """One source of rows. A recipe lists one or more `[[data]]` entries; a run mixes them by `share`."""

    path: Annotated[str, MOVED, FILE] = Field(min_length=1)
    """A dataset folder made by `vlmrl prep`; a .parquet, .jsonl, .json or .csv file; or `hub:<name>`
    (`#config` if any)."""
    name: Annotated[str | None, ROWS] = None
    """Short name in metrics and rollouts; default: the last part of `path`."""
    task: Annotated[str, ROWS, FILE_OR_NAME] = "table"
    """Task that renders and scores the rows: a name (`vlmrl recipe list --tasks`), or a function of your own that
    returns a `vlmrl.Task`, as path/to/file.py:function. Such a function runs in the trainer's process."""
    variant: Annotated[str | None, PROMPT] = None
    """Variant of the task: what its prompt asks for and its reward reads, such as intermediate steps, a thought, or
    boxes in a coordinate space (`vlmrl recipe list --tasks` lists the variants). im = the task's main one; default:
    im, which is `thousand` (0 to 1000) for boxes; or baseline if the dataset lacks the truth for im."""
    share: Annotated[Share, ROWS] = 1.0
    """Relative share of the prompts of each step that come from this source."""
    split: Annotated[str, ROWS] = "train"
    """Split that training draws from."""
    validation: Annotated[Annotated[float, Field(gt=0, lt=1)] | str | None, MEASURE, FILE_OR_NAME] = None
    """Validation rows: the name of a split, a file, or a share of the rows such as 0.1, which is held out of training;
    default: the split `validation` if the source has one. A share is held out in groups: no image of a held-out row is
    in a training row, and no text of its prompt, unless too many rows have the same text. Every row is read first."""
    validation_seed: Annotated[int, Field(ge=0, lt=2**63), ROWS] = 0
    """Seed of a share that is held out. It is no part of `train.seed`: runs with other seeds validate on the same
    rows."""
    prompt: Annotated[str | None, MOVED, FILE] = None
    """Jinja template file of the user message (columns are its variables, `<image>` marks an image); default:
    the task's."""
    system: Annotated[str | None, PROMPT] = None
    """System message, as text."""
    reward: Annotated[str | None, REWARD, FILE_OR_NAME] = None
    """Reward of this source: a built-in name or `path/to/file.py:function`; default: `[reward] name`, else the
    task's."""
    images_root: Annotated[str | None, ROWS, FILE] = None
    """Folder that relative image paths are looked up in; paths that leave it are refused. Default: the table's
    folder."""
    columns: Annotated[dict[str, str], ROWS] = {}
    """Names of this table's columns that are not recognised: keys prompt, images, answer, response, tools, system,
    history; values as in the file."""
    max_rows: Annotated[PositiveInt | None, ROWS] = None
    """Use only the first rows of the split."""
    rewards: Annotated[list[ListedReward], REWARD] = []
    """Several rewards of this source, each in a table `[[data.rewards]]`; default: `[[rewards]]` if the source names no
    `reward`."""
    environment: Annotated[str | None, ENVIRONMENT, FILE_OR_NAME] = None
    """Environment of this source, as path/to/file.py:name or :NAME; "none" = its responses are one turn. Default:
    `[environment] name`."""
    demonstrations: Annotated[str, SOURCES, FILE_OR_NAME, RL_ONLY] = "rows"
    """Demonstrations for rows of the algorithm table that learn from them (`algo.demonstrations`). rows = each row's
    own: its column `response`, or a trace of the task, as in supervised training. A run, by id, name or path: the best
    answer that it sampled to a prompt. A file: responses by `prompt_id`, as `vlmrl generate --out` and `vlmrl eval`
    write them; the one with the best score, else the first. none = this source has none."""
    demonstration_share: Annotated[Fraction, SAMPLING, RL_ONLY] = 1.0
    """Share of this source's prompts that have their demonstration; which ones is drawn each time a prompt is."""
    _default_rewards: list[ListedReward] = PrivateAttr(default_factory=list)
    _environment: Environment = PrivateAttr(default_factory=lambda: Environment())

    @property
    def own_environment(self) -> Environment | None:
        """The environment of this source with its limits; None = its responses are one turn."""
        name = self._environment.name if self.environment is None else self.environment
        return None if name in ("", NO_ENVIRONMENT) else self._environment.model_copy(update={"name": name})

    @property
    def all_rewards(self) -> list[ListedReward]:
        """The rewards of this source if it has several: its own list, else the recipe's; [] = a single reward."""
        return self.rewards or ([] if self.reward else self._default_rewards)


class Reward(RecipeTable):
    """Scoring of responses."""

    name: Annotated[str | None, REWARD, FILE_OR_NAME] = None
    """A built-in reward or `path/to/file.py:function`; default: the task's own."""
    profile: Annotated[str, REWARD] = "default"
    """Profile of the task's own reward: default, or another that the task has (`vlmrl recipe list --tasks` lists them).
    Used if `name` is not set."""
    style: Annotated[Literal["auto", "vlmrl", "trl", "verl", "easyr1"], REWARD] = "auto"
    """Calling convention of a `file.py:function`; auto reads it from the parameter names."""
    args: Annotated[dict[str, Any], REWARD] = {}
    """Keyword arguments that are bound to the reward once, so that a misspelt one fails at load. They replace those
    that the task binds to its own reward; a table, such as `aliases = {Silverbeck = "Silverback"}`, is added to the
    task's."""
    weights: Annotated[dict[str, Number], REWARD] = {}
    """Weight of each part, used as given (not normalised); default: the reward's own."""
    accuracy: Annotated[str | None, MEASURE] = None
    """Part that says whether a response is right: it becomes the metric `accuracy` and needs no weight. Default: the
    task's own measure, else the part `accuracy`, `acc` or `correct`."""
    timeout_seconds: Annotated[float, Field(ge=1e-3, le=3600), SPEED] = 10.0
    """Maximum wall time of one call of a reward in a worker process, in seconds. The process is ended after that time.
    A user's reward runs there, and some built-ins do, which may have a shorter limit of their own."""
    memory_mb: Annotated[int, Field(ge=128, le=MOST), SPEED] = 4096
    """Address-space limit of one reward worker, in MiB."""
    workers: Annotated[int, Field(gt=0, le=4096), SPEED] = 1
    """Worker processes for a user's reward, or for a built-in that runs in workers."""
    on_timeout: Annotated[dict[str, Number], REWARD] = {}
    """Parts of the score of a response that hangs or kills a user's reward twice, the second time scored alone, such as
    `{ answer = 0.0 }`. Left out = ON_TIMEOUT in the reward's file; without one, such a response has no score, like any
    response on which the reward fails."""
    outage: Annotated[Literal["wait", "mask", "stop"], LIMIT] = "wait"
    """Action when a reward raises `vlmrl.RewardUnavailable`, because a service that it needs is down. wait = the
    missing samples are scored again until the service answers, and nothing is lost; the default, because most outages
    are short. mask = the samples are left out and counted in `reward/unavailable`. stop = a checkpoint of this step is
    saved and the run ends (exit code 75). A missing sample is never scored 0 and never counts as a bug."""
    outage_minutes: Annotated[float, Field(gt=0, le=10_080), LIMIT] = 30.0
    """With outage = "wait": after so many minutes without any answer the run saves a checkpoint and ends with exit code
    75; a resume goes on at the same step."""
    _judge: Judge = PrivateAttr(default_factory=Judge)


NO_ENVIRONMENT = "none"
"""Name of the environment of a source whose responses are one turn, beside others that have one."""


class Environment(RecipeTable):
    """Tools that the model calls between its turns, in a process for each episode."""

    name: Annotated[str, ENVIRONMENT, FILE_OR_NAME] = ""
    """Tools as path/to/file.py:name: a typed function, a list of functions, a class whose public methods are the tools
    (TRL's `environment_factory` form), a tool class of verl, a client class of OpenEnv, or a dict of classes, chosen by
    the rows' column `environment`. `:NAME` is NAME in the file of the task. Left out = a response is one turn."""
    args: Annotated[dict[str, Any], ENVIRONMENT] = {}
    """Keyword arguments of the class; they replace those that the task binds to its own one."""
    calls: Annotated[Literal["auto", "hermes", "qwen_xml", "gemma4", "glm"], ENVIRONMENT] = "auto"
    """Form in which the model writes calls; auto = that of its chat template."""
    turns: Annotated[PositiveInt, ENDING] = 4
    """Largest number of turns of the model; one turn has at most `rollout.max_new_tokens` tokens."""
    tokens: Annotated[Tokens, ENDING] = 2048
    """Largest number of tokens of an episode behind its prompt, observations included. A turn begins only if a whole
    one still fits."""
    images: Annotated[Count, ENDING] = 8
    """Largest number of images that tools show in an episode."""
    image_pixels: Annotated[Pixels, PROMPT] = 1_003_520
    """Largest area of an image of a tool, in pixels; a larger one is shrunk before anything else sees it."""
    observation_tokens: Annotated[Tokens, PROMPT] = 512
    """Largest number of text tokens of one observation; a longer one is cut in the middle."""
    tool_seconds: Annotated[float, Field(ge=0.01, le=86_400), ENDING] = 10.0
    """Longest time of one call. A tool that takes longer is interrupted, and the model sees an error; one that goes on
    ends the episode."""
    seconds: Annotated[float, Field(ge=0.01, le=604_800), ENDING] = 300.0
    """Longest time that the environment works for an episode, in all; the time of the model's turns does not count."""
    grey_images: Annotated[bool, PROMPT] = False
    """Switch that shows grey images in the place of those of tools, to measure how much the model needs them."""
    memory_mb: Annotated[int, Field(ge=128, le=MOST), LIMIT] = 4096
    """Address-space limit of an episode's process, in MiB."""
    workers: Annotated[int, Field(ge=0, le=4096), SPEED] = 0
    """Calls that run at the same time on a machine; 0 = twice the number of its CPU cores."""


class Rollout(RecipeTable):
    """Sampling of responses."""

    engine: Annotated[Literal["auto", "torch", "vllm"], SAMPLING, RL_ONLY] = "auto"
    """Engine that generates in `train` and `eval`. torch = the built-in one; vllm = vLLM, whose own weights are synced
    every step; auto = vllm on a GPU where it is installed and supports the model, else torch; chosen when a run begins,
    and kept on resume. `sft`, `try` and `check --deep` always use the built-in one."""
    kv_cache_gib: Annotated[Annotated[float, Field(ge=1e-3, le=1e6)] | None, SPEED, RL_ONLY] = None
    """Memory of vLLM's key-value cache on each GPU that it uses, in GiB. Left out = as much as all responses of a step
    need at once, or as much as is free; `check` shows it."""
    engine_gpus: Annotated[Count, SPEED] = 0
    """With vllm: number of GPUs that only generate, the last ones of `--gpus`; the others train. 0 = each GPU does both
    in turn, in the trainer's process."""
    tensor_parallel: Annotated[PositiveInt, SPEED, RL_ONLY] = 1
    """With vllm: number of parts that every weight of an engine is cut into, each on its own GPU; for models that are
    too large for one GPU. An engine then serves that many processes, on their GPUs; with `engine_gpus` it takes that
    many of the engine GPUs instead."""
    weight_transport: Annotated[Literal["auto", "socket"], SPEED, RL_ONLY] = "auto"
    """Way of the weights to a vLLM engine in another process. auto = from GPU to GPU: handles of GPU memory (CUDA IPC)
    to an engine on the trainers' GPUs, NCCL to engine GPUs; on a CPU, sockets. socket = always through sockets and main
    memory: slower, and it works where processes may not open each other's GPU memory. All send the same numbers."""
    overlap: Annotated[bool, SAMPLING] = False
    """With `engine_gpus`: sample the next step's rollouts during this step's update, so with weights that are one step
    older. `algo.importance` corrects for that; with auto it then uses the engine's log-probs as the old ones."""
    max_sync_gap: Annotated[Positive, LIMIT, RL_ONLY] = 0.1
    """After each weight sync the trainer re-scores a few responses of every vLLM engine. The run stops when the median
    difference of the tokens' log-probs (nats) is above this value, over all engines or for one engine with 8 tokens or
    more. A single token may differ by more. In float32 the median is below 1e-5, in bfloat16 about 0.01."""
    prompts_per_step: Annotated[int, Field(gt=0, le=1_000_000), SAMPLING, RL_ONLY] = 32
    """Number of different prompts per step."""
    samples_per_prompt: Annotated[int, Field(gt=0, le=1_000_000), SAMPLING, RL_ONLY] = 8
    """Responses per prompt (the group size n)."""
    max_new_tokens: Annotated[Tokens, ENDING] = 512
    """Token limit of one response, end token included."""
    max_prompt_tokens: Annotated[Tokens, LIMIT] = 4096
    """Token limit of a prompt, image tokens included. A row with a longer prompt is an error in `check`; nothing is
    cut."""
    temperature: Annotated[float, Field(ge=1e-3, le=1e3), SAMPLING, RL_ONLY] = 1.0
    """Sampling temperature; it is part of the policy: log-probs are those of softmax(logits / temperature)."""
    top_p: Annotated[PositiveFraction, SAMPLING, RL_ONLY] = 1.0
    """Nucleus sampling; below 1 the importance correction does not hold, so `allow_filtered_sampling` must be set."""
    top_k: Annotated[Count, SAMPLING, RL_ONLY] = 0
    """Sample among the k most likely tokens; 0 = off; see `top_p`."""
    allow_filtered_sampling: Annotated[bool, LIMIT] = False
    """Allow training with top_p < 1 or top_k > 0."""
    batch_tokens: Annotated[Tokens, SPEED] = 65_536
    """Maximum number of tokens (prompt and response) that the built-in engine holds in its key-value cache at once."""
    stop: Annotated[list[str], ENDING] = []
    """Strings that end a response when they appear; kept in the text."""


class Train(RecipeTable):
    """Length and batching of a run."""

    steps: Annotated[Count, LENGTH] = 100
    """Number of training steps; one step = one new policy version. `epochs` may be given instead; then this key is 0
    until a run begins."""
    seed: Annotated[int, Field(ge=0, lt=2**63), ORDER] = 0
    """Seed of everything random: data order, sampling, initialisation."""
    rows_per_step: Annotated[int, Field(gt=0, le=1_000_000), UPDATE, SFT_ONLY] = 32
    """Number of rows per step of `vlmrl sft`."""
    updates_per_step: Annotated[PositiveInt, UPDATE, RL_ONLY] = 1
    """Number of optimizer updates on the rollouts of one step."""
    tokens_per_row: Annotated[Tokens, SPEED] = 4096
    """Token budget of one packed row of a microbatch; memory grows with it, results do not depend on it."""
    rehearsal: Annotated[bool, SPEED] = True
    """Before the first step, run the largest row that the data can make forward and backward, and change nothing: a run
    that does not fit in memory ends then and names the key to change. false = such a run fails later."""
    stop_above: Annotated[Number | None, LENGTH] = None
    """Stop early when the validation metric (`eval.metric`) reaches this value."""
    max_seconds: Annotated[PositiveInt | None, LENGTH] = None
    """Stop after this many seconds of training (a last checkpoint is saved)."""
    epochs: Annotated[Annotated[float, Field(gt=0, le=1e6)] | None, LENGTH] = None
    """Number of passes over the data, in place of `steps`: the run has as many steps as are needed to draw that many
    times the rows of all sources together. The steps are counted when a run begins, and kept on resume. With one source
    every row is drawn that often; `share` can make a pass over one source longer than over another. Prompts that a
    filter replaces do not count."""


class Optim(RecipeTable):
    """AdamW, and its learning rate."""

    name: Annotated[Literal["adamw", "adamw_8bit", "adamw_bf16_kahan"], TRAINED_PARTS] = "adamw"
    """adamw: float32 masters, fused; adamw_8bit: its moments in 8 bits (bitsandbytes); adamw_bf16_kahan: bfloat16
    weights without masters, with the rounding error carried to the next update (Kahan)."""
    lr: Annotated[float, Field(ge=1e-12, le=1e3), UPDATE] = 1e-6
    """Peak learning rate; 1e-5 if the recipe has a `[lora]` table and does not set it."""
    schedule: Annotated[Literal["constant", "linear", "cosine"], UPDATE] = "constant"
    """Shape after the warm-up; linear and cosine fall to `min_lr_ratio` at the last step."""
    warmup_steps: Annotated[Count, UPDATE] = 0
    """Steps of linear warm-up; the first step already has lr / warmup_steps, never 0."""
    min_lr_ratio: Annotated[Fraction, UPDATE] = 0.0
    """Final learning rate as a share of `lr`."""
    weight_decay: Annotated[NotNegative, UPDATE] = 0.0
    """Decoupled weight decay, on matrices only."""
    beta1: Annotated[float, Field(ge=0, lt=1), UPDATE] = 0.9
    """AdamW beta1."""
    beta2: Annotated[float, Field(ge=0, lt=1), UPDATE] = 0.999
    """AdamW beta2."""
    max_grad_norm: Annotated[float, Field(ge=1e-9, le=1e12), UPDATE] = 1.0
    """Maximum norm of the gradients; larger ones are scaled down to it."""
    warmup_ratio: Annotated[Annotated[float, Field(gt=0, lt=1)] | None, UPDATE] = None
    """Share of the steps that is warm-up, in place of `warmup_steps`, rounded up to whole steps. Counted when a run
    begins, and kept on resume."""
    epsilon: Annotated[float, Field(ge=1e-16, le=1.0), UPDATE] = 1e-8
    """AdamW epsilon, added to the root of the second moment. A larger one makes the steps of rarely used weights
    smaller."""


class Checkpoint(RecipeTable):
    """Saving and keeping of checkpoints."""

    every_steps: Annotated[Count, CADENCE] = 50
    """Steps between checkpoints; 0 = only the last (and one when interrupted)."""
    keep_last: Annotated[PositiveInt, CADENCE] = 2
    """Number of newest checkpoints to keep, besides the best one. Old ones are deleted only after the new one is
    complete."""
    keep_best: Annotated[bool, CADENCE] = True
    """Keep the checkpoint of the best validation."""
    asynchronous: Annotated[bool | None, CADENCE] = None
    """Write checkpoints while training goes on, from a copy of weights and moments in main memory, which stays
    allocated; the step loop waits only for the copy. One checkpoint at a time. Left out = only on a GPU."""


class Parallel(RecipeTable):
    """Settings for several processes, started with `--gpus`."""

    timeout_seconds: Annotated[Seconds, SPEED] = 1800.0
    """Maximum time of a process in one phase of a step (sampling, updating, saving ...), in seconds. After it the run
    ends, with an error that names the process and the phase, and with the stacks of all processes in their logs."""
    shard_size: Annotated[PositiveInt | None, SPEED] = None
    """Number of processes that together hold one copy of the model; it must divide the number of all processes. With 8
    for 32 processes, weights are gathered within each machine of 8, and only gradients travel between machines. Left
    out = all processes."""
    offload: Annotated[bool, SPEED] = False
    """Keep parameters, gradients and moments in main memory between their uses: slower, for models that do not fit."""


class Recipe(RecipeTable):
    """A whole recipe: the arguments of one run."""

    kind: Annotated[Literal["rl", "sft"], RUN_KIND] = "rl"
    """Kind of run: `vlmrl train` (rl) or `vlmrl sft` (sft)."""
    model: Model
    lora: Lora | None = None
    teacher: Teacher | None = None
    data: Annotated[list[Data], SOURCES] = Field(min_length=1)
    reward: Reward = Reward()
    algo: Algo = Algo()
    environment: Environment = Environment()
    rollout: Rollout = Rollout()
    train: Train = Train()
    optim: Optim = Optim()
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    parallel: Parallel = Parallel()
    log: Log = Log()
    judge: Judge = Judge()
    paper: Annotated[dict[str, Any], CADENCE] = {}
    """Published numbers (`[paper.numbers]`) and their `source`; `eval` and `report` show them beside yours."""
    rewards: Annotated[list[ListedReward], REWARD] = []
    """Several rewards, each in a table `[[rewards]]`, of the sources that name none of their own. The score is the
    weighted sum of their scores."""

    @property
    def has_episodes(self) -> bool:
        """Return whether the responses to a source are episodes of several turns."""
        return any(source.own_environment for source in self.data)

    @property
    def teacher_model(self) -> Model | None:
        """Return the teacher's `[model]` table; None without a teacher, or if it is the policy as the run began."""
        if (teacher := self.teacher) is None or teacher.is_start:
            return None
        given = {"min_pixels": teacher.min_pixels, "max_pixels": teacher.max_pixels, "thinking": teacher.thinking}
        given |= {"dtype": None if teacher.dtype == "auto" else teacher.dtype}
        own = {"path": teacher.path if teacher.checkpoint == AUTO else teacher.checkpoint}
        own |= {"revision": teacher.revision, "trust_remote_code": teacher.trust_remote_code}
        own |= {"freeze": [], "quantize": None, "gradient_checkpointing": False}
        return self.model.model_copy(update=own | {key: value for key, value in given.items() if value is not None})

    @property
    def longest_response(self) -> int:
        """Largest number of tokens behind a prompt: of one turn with a hint, or of an episode with its observations."""
        turn, row = self.rollout.max_new_tokens, ALGORITHMS.get(self.algo.name)
        hinted = (getattr(self.algo, "demonstrations", None) or (row and row.demonstrations)) == "hint"
        return max(turn * (2 if hinted else 1), self.environment.tokens if self.has_episodes else 0)

    @model_validator(mode="after")
    def _give_defaults(self) -> Recipe:
        """Give the recipe's list of rewards to its sources, and the judge to the rewards."""
        for source in self.data:
            source._default_rewards, source._environment = self.rewards, self.environment
            for listed_reward in source.rewards:
                listed_reward._judge = self.judge
        for settings in (self.reward, *self.rewards):
            settings._judge = self.judge
        return self
