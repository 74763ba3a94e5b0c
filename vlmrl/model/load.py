"""Loading of a Hugging Face model and its processor, ready to be trained or sampled."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vlmrl.errors import CheckpointError
from vlmrl.model.attention import NAME as SHARED_PREFIX
from vlmrl.model.attention import VISION_NAME as VISION
from vlmrl.model.attention import use_kernels
from vlmrl.model.caches import checkpoint_layer
from vlmrl.model.device_memory import keep_freed_memory
from vlmrl.model.families import PART_NAMES, family_of, part_of
from vlmrl.model.gpus import require_gpus
from vlmrl.model.memory import Setting, recomputed_layers
from vlmrl.model.model_facts import loading
from vlmrl.model.model_files import CHAT_TEMPLATE, PROCESSOR, PROCESSOR_FILES, TOKENIZER, cached_folder, require_source
from vlmrl.model.safetensors_blocks import refuse_incomplete, refuse_non_finite
from vlmrl.model.stored_weights import is_stored, tie_equal_weights, weights_left_in_files
from vlmrl.untrusted import parse_json

if TYPE_CHECKING:  # type checkers only: loading a model must need no packages but torch and transformers
    from vlmrl.recipe.schema import Model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DROPOUT_RATES = ("attention_dropout", "hidden_dropout", "dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop")
"""Names of dropout rates in model configurations and as attributes of modules."""
IMAGE_TOKENS = (
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "audio_token_id",
    "image_token_index",
    "video_token_index",
    "boi_token_id",
    "eoi_token_id",
)


def pick_device(device: str) -> torch.device:
    """Return the device of a recipe's `model.device`.

    Raises: LaunchError when this process has GPUs that torch cannot use; CheckpointError when the setting is "cuda" and
        torch sees no CUDA device.
    """
    if device != "cpu":
        require_gpus()
    if device == "cuda" and not torch.cuda.is_available():
        raise CheckpointError("model.device is cuda, but torch sees no CUDA device", hint="--set model.device=cpu")
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")


def load_model(
    settings: Model,
    *,
    path: str | None = None,
    weights_from: Callable[[Model], Any] | None = None,
    in_files: bool = False,
) -> Any:
    """Return a model ready to train and sample: without dropout, on its device, with shared-prefix attention.

    Models of families that cannot share a prefix keep their own attention.

    Args:
        path: overrides `settings.path` (a resolved folder).
        weights_from: function that returns the model, for example from a checkpoint; None = read it from `path`.
        in_files: whether the weights stay in their files; see `read_model`.
    Raises: CheckpointError when the model cannot be loaded.
    """
    return prepare_model(
        read_model(settings, path, in_files) if weights_from is None else weights_from(settings), settings
    )


def read_model(settings: Model, path: str | None = None, in_files: bool = False) -> Any:
    """Return the model of a folder or hub name as transformers loads it, before `prepare_model`.

    torch's random state does not change.

    Args:
        in_files: whether the weights stay in their files, for a model that is sharded: its parameters are on the meta
            device. Whether they are finite is then checked when they are read.
    Raises: CheckpointError when it cannot be read, or when a weight is missing, has another shape, or is not finite.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText

    require_source(path or settings.path, settings.revision)
    source, kwargs = path or settings.path, _hub_arguments(settings, path)
    # transformers draws first values for some weights that it then loads: not if they stay in their files.
    with loading(source), torch.random.fork_rng(devices=[]):
        config = AutoConfig.from_pretrained(source, **kwargs)
        _no_dropout(config)
        with weights_left_in_files(source) if in_files else nullcontext():
            loaded: Any = AutoModelForImageTextToText.from_pretrained(
                source,
                config=config,
                dtype=DTYPES[settings.dtype],
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **quantized_arguments(settings, config),
                **kwargs,
            )
        model, report = loaded
        refuse_incomplete(report, source)
        if is_stored(model):
            tie_equal_weights(model)
        else:
            refuse_non_finite(model, source)
        return model


def quantized_arguments(settings: Model, config: Any) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for `model.quantize`: NF4 with double quantization.

    Args:
        config: the model's configuration. The linear layers of its other parts are listed by name in the result, so
            that they are not quantized.
    Raises: CheckpointError when bitsandbytes is missing.
    """
    if settings.quantize is None:
        return {}
    if importlib.util.find_spec("bitsandbytes") is None:
        from vlmrl.errors import install_line

        message = f'model.quantize = "{settings.quantize}" needs bitsandbytes'
        raise CheckpointError(message, hint=install_line("bitsandbytes"))
    from transformers import AutoModelForImageTextToText, BitsAndBytesConfig

    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config, trust_remote_code=settings.trust_remote_code)
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    whole = [name for name in linear if part_of(f"{name}.weight") != "language"]
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=DTYPES[settings.dtype],
        llm_int8_skip_modules=whole,
    )
    return {"quantization_config": quantization, "device_map": {"": pick_device(settings.device)}}


def prepare_model(model: Any, settings: Model) -> Any:
    """Set attention, checkpointing, frozen parts, device and eval mode of a model, as the recipe says.

    Raises: CheckpointError when `model.freeze` lists a part that this model does not have, or the kernels of
        `model.attention` cannot be used.
    """
    device = pick_device(settings.device)
    share_prefix(model)
    if device.type == "cuda":
        use_kernels(settings.attention)
    checkpoint_gradients(model, settings.gradient_checkpointing)
    parts = {name: part_of(name) for name, _ in model.named_parameters()}
    check_freeze(settings, set(parts.values()))
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():  # 4-bit weights are bytes
            parameter.requires_grad_(parts[name] not in settings.freeze)
    # In RL, sampling and training must compute the same function: no dropout, in training mode too (see
    # Policy.forward).
    for module in model.modules():
        for rate in DROPOUT_RATES:
            if isinstance(getattr(module, rate, None), float):
                setattr(module, rate, 0.0)
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    # A quantized model was loaded onto its device. Weights in files get a device when they are sharded.
    if not getattr(model, "is_quantized", False) and not is_stored(model):
        model = model.to(device)
    if device.type == "cpu":
        keep_freed_memory()
    return model.eval()


def check_freeze(settings: Model, parts: Collection[str | None]) -> None:
    """Raise a CheckpointError unless the model has all parts in `model.freeze`, and at least one other part."""
    there = [p for p in PART_NAMES if p in parts]
    for name in settings.freeze:
        if name not in parts:
            message = f"`model.freeze` names `{name}`, a part that no parameter of this model belongs to"
            raise CheckpointError(message, hint=f"its parts: {', '.join(there)}")
    if set(parts) <= set(settings.freeze):
        raise CheckpointError("`model.freeze` names every part: nothing is left to train", hint="leave one of them out")


def share_prefix(model: Any) -> None:
    """Set the text attention that accepts packed rows, if the family can share a prefix; other calls use plain SDPA.

    Vision towers that run images of any size as one sequence (in families whose position ids have three axes) get one
    attention call for all windows.
    """
    family = family_of(model)
    if family.sharing != "padded":
        vision = VISION if family.rope_index else "sdpa"
        model.set_attn_implementation({"text_config": SHARED_PREFIX, "vision_config": vision})


def checkpoint_gradients(model: Any, setting: Setting = True) -> None:
    """Turn gradient checkpointing on for the layers that a setting recomputes (model/memory.py).

    Raises: CheckpointError for a share of the layers if the model's text layers cannot be recomputed one by one.
    """
    text = [m for name, m in model.named_modules() if _is_layer(m) and part_of(f"{name}.") == "language"]
    recomputed = recomputed_layers(setting, len(text))
    if not recomputed.vision:
        return
    if isinstance(setting, float) and not text:
        message = f"model type `{model.config.model_type}` has no text layers that can be recomputed one by one"
        raise CheckpointError(message, hint="set model.gradient_checkpointing to true, false or vision")
    old = "gradient_checkpointing_enable"  # name up to transformers 5.22
    enable = getattr(model, "activation_checkpointing_enable", None) or getattr(model, old)
    enable({"use_reentrant": False})
    # transformers makes embeddings and patches require gradients, because reentrant checkpointing needs it. With an
    # adapter or a frozen vision tower, the backward pass would then run through the whole tower without any use.
    model.disable_input_require_grads()
    forked = family_of(model).sharing == "forked"
    chosen = set(text[: recomputed.text])
    for name, module in model.named_modules():
        if forked and hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = checkpoint_layer
        if setting is not True and hasattr(module, "gradient_checkpointing") and part_of(f"{name}.") != "vision":
            module.gradient_checkpointing = module in chosen


def _is_layer(module: torch.nn.Module) -> bool:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return isinstance(module, GradientCheckpointingLayer)


def load_processor(settings: Model, *, path: str | None = None) -> Any:
    """Return the model's processor (tokenizer, image processor, chat template).

    Raises: CheckpointError when it cannot be read or has no image processor.
    """
    from transformers import AutoProcessor

    source = path or settings.path
    require_source(source, settings.revision)
    with loading(source):
        processor = AutoProcessor.from_pretrained(source, **_hub_arguments(settings, path))
    if not hasattr(processor, "image_processor"):
        raise CheckpointError(f"{source} has no image processor: it is not a vision-language model")
    if not getattr(processor, "chat_template", None):
        processor.chat_template = getattr(processor.tokenizer, "chat_template", None) or _template_file(Path(source))
    folder = Path(source) if Path(source).is_dir() else cached_folder(source)
    # Kept in memory: the folder may be a checkpoint that is removed before the next one is written.
    processor.original_files = {} if folder is None else _processor_files(folder)
    return processor


def _processor_files(folder: Path) -> dict[str, bytes]:
    names = {path.name for path in folder.iterdir()}
    is_whole = names & set(TOKENIZER) and names & set(PROCESSOR)
    return {name: (folder / name).read_bytes() for name in sorted(names & PROCESSOR_FILES)} if is_whole else {}


def _template_file(folder: Path) -> Any:
    """Return the template of `chat_template.json`, the older form of `chat_template.jinja`; None without it."""
    file = folder / CHAT_TEMPLATE
    return parse_json(file.read_bytes()).get("chat_template") if file.is_file() else None


def write_processor(processor: Any, folder: Path) -> None:
    """Write the files of a processor as they were read: training changes none of them.

    Other versions of transformers, and other programs, then read the folder as they read the original. Of a processor
    that was not read by `load_processor`, transformers writes the files in its own form.
    """
    files: Mapping[str, bytes] = getattr(processor, "original_files", {})
    if not files:
        processor.save_pretrained(folder)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def refuse_unknown_ids(tokenizer: Any, num_embeddings: int, source: str) -> None:
    """Raise a CheckpointError if the tokenizer has a token whose id is beyond the embedding."""
    beyond = {token: id_ for token, id_ in tokenizer.get_vocab().items() if id_ >= num_embeddings}
    if beyond:
        token, id_ = min(beyond.items(), key=lambda one: one[1])
        message = f"{len(beyond):,} tokens of the tokenizer have no embedding, such as {token!r} with the id {id_:,}"
        hint = f"the model has {num_embeddings:,} embeddings: use its own tokenizer, or `resize_token_embeddings`"
        raise CheckpointError(message, where=source, hint=hint)


def require_same_tokenizer(own: Any, theirs: Any, path: str) -> None:
    """Raise a CheckpointError unless every token of the policy has the same id in the teacher's tokenizer.

    Args:
        path: the teacher's path, for the message.
    """
    ours, others = own.get_vocab(), theirs.get_vocab()
    if unlike := sorted((i, token) for token, i in ours.items() if others.get(token) != i):
        id_, token = unlike[0]
        place = "which it does not have" if token not in others else f"which has the id {others[token]:,} there"
        message = f"the teacher {path} has another tokenizer: {len(unlike):,} of {len(ours):,} tokens differ, such as"
        hint = "the two models are compared token by token: choose a teacher with the model's tokenizer"
        raise CheckpointError(f"{message} {token!r} with the id {id_:,}, {place}", where="teacher.path", hint=hint)


def stop_ids_of(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Return the ids that end a response: the end tokens of the generation config, and the tokenizer's end token."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    end_ids = configured if isinstance(configured, list) else [configured]
    return tuple(sorted({int(i) for i in [*end_ids, tokenizer.eos_token_id] if i is not None}))


def banned_ids_of(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Return the ids that must never be sampled (never the end token).

    They are image, video and padding tokens, and the rows of a padded embedding that no token belongs to.
    """
    ids = {getattr(model.config, name, None) for name in IMAGE_TOKENS} | {tokenizer.pad_token_id}
    ids |= set(range(model.get_input_embeddings().weight.shape[0])) - set(tokenizer.get_vocab().values())
    return tuple(sorted({int(i) for i in ids if isinstance(i, int)} - set(stop_ids_of(model, tokenizer))))


def _hub_arguments(settings: Model, path: str | None) -> dict[str, Any]:
    local = Path(path or settings.path).exists()
    return {"trust_remote_code": settings.trust_remote_code} | ({} if local else {"revision": settings.revision})


def _no_dropout(config: Any) -> None:
    for part in (config, *(getattr(config, n, None) for n in ("text_config", "vision_config"))):
        for name in DROPOUT_RATES:
            if part is not None and hasattr(part, name):
                setattr(part, name, 0.0)
