"""Tiny Qwen2.5-VL with real architecture and a newly trained tokenizer, saved as an ordinary Hugging Face folder.

Tests and the demo use it, so that they need no download. It has about 1.3 M parameters; 56 x 56 pixels become 4 tokens.
`vlmrl demo --model-only OUT --data DATASET` builds one for your own dataset.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vlmrl.errors import CheckpointError, way_out
from vlmrl.model.model_facts import quiet_transformers

INIT_STD = 0.1
"""Standard deviation of the random weights: about one over the square root of the width, as in a model trained from
scratch at this size. With transformers' default of 0.02, which is meant for wide models, the model does not learn to
compare two names in its context within 500 steps."""
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}"
    "{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tiny(
    folder: Path | str,
    texts: Iterable[str],
    *,
    seed: int = 0,
    vocabulary: int = 512,
    hidden: int = 128,
    layers: int = 3,
    vision_layers: int = 2,
    min_pixels: int = 56 * 56,
    max_pixels: int = 112 * 112,
    init_std: float = INIT_STD,
) -> Path:
    """Write a randomly initialised Qwen2.5-VL and its processor to `folder`.

    Args:
        texts: training texts of the tokenizer (prompts and answers of the task).
        hidden: hidden width, a multiple of 32; each head is 32 wide.
        vocabulary: maximum number of entries of the byte-level BPE tokenizer, at least 264.
        min_pixels, max_pixels: bounds of the image area.
    Returns: the folder.
    Raises: CheckpointError when the folder exists and is not empty, or cannot be written; it is then not there.
    """
    import torch
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
    )
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise CheckpointError(f"{folder} is not empty", hint="name a new folder, or remove this one")
    tokenizer = _train_tokenizer(texts, vocabulary)
    ids: dict[str, Any] = {t: tokenizer.convert_tokens_to_ids(t) for t in SPECIAL_TOKENS}
    shared = {"hidden_size": hidden, "intermediate_size": hidden * 2, "initializer_range": init_std}
    section = [4, 6, 6]
    config = Qwen2_5_VLConfig(
        text_config=shared
        | {
            "vocab_size": len(tokenizer),
            "num_hidden_layers": layers,
            "num_attention_heads": hidden // 32,
            "num_key_value_heads": hidden // 64,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "mrope_section": section, "rope_theta": 10000.0},
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
        },
        vision_config=shared
        | {
            "depth": vision_layers,
            "num_heads": hidden // 32,
            "out_hidden_size": hidden,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [vision_layers - 1],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        model = Qwen2_5_VLForConditionalGeneration(config).float()
    finally:
        torch.random.set_rng_state(state)
    generation = model.generation_config
    assert generation is not None
    generation.eos_token_id, generation.pad_token_id = ids["<|im_end|>"], ids["<|endoftext|>"]
    processor = Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(min_pixels=min_pixels, max_pixels=max_pixels),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(),
        chat_template=CHAT_TEMPLATE,
    )
    temp = folder.with_name(f".tmp-{folder.name}-{os.getpid()}")
    try:
        with quiet_transformers():
            model.save_pretrained(temp)
        processor.save_pretrained(temp)
        os.replace(temp, folder)
    except Exception as error:  # on a full disk, safetensors and tokenizers raise classes of their own
        hint = f"{way_out(error)}; or name another folder; nothing was written"
        raise CheckpointError(f"the model could not be written: {error}", where=str(folder), hint=hint) from error
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    return folder


def _train_tokenizer(texts: Iterable[str], vocabulary: int):
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    # Each digit is a token of its own, as in Qwen's tokenizer; a tag, a word, and in markup the begin of a tag, an
    # attribute's name with its quotes or an address may become a single token.
    markup = r"</?[a-z_\-]+>?|\"?[ ]?[A-Za-z_\-]+=\"|https?://[^\s\"<>]+"
    pieces = Regex(markup + r"|[0-9]| ?[A-Za-z_\-]+|\s+| ?[^\sA-Za-z0-9<]+|<")
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pieces, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL_TOKENS[1:]),
        clean_up_tokenization_spaces=False,
    )
