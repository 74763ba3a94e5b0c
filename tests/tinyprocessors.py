"""Real processors of the families, made offline: their own classes, over a tokenizer trained on the spot.

Ids 10 to 13 are the image, video, start and end tokens of tests/tinyfamilies.py: its models take what these make.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from vlmrl.data.encode import Encoder

TEXTS = ["Are these two images the same digit? Answer with a number.", "0 1 2 3 4 5 6 7 8 9 yes no same different"]
IMAGE_ENTRY = "{% if c.type == 'image' %}ENTRY{% else %}{{ c.text }}{% endif %}"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    + IMAGE_ENTRY
    + "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}[answer]{% endif %}"
)


def tokenizer(image: str, video: str, start: str, end: str, named: Mapping[str, str], *more: str) -> Any:
    """A byte-level BPE whose first ids are special: 0 padding, 1 begin, 2 end, 10 image, 11 video, 12 start, 13 end.

    Args: named: attribute -> token, as the family's own tokenizer has them (`image_token`, `boi_token`, ...).
    """
    special = ["<pad>", "<bos>", "<eos>", *(f"<unused{i}>" for i in range(7)), image, video, start, end, *more]
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=special[3:],
        extra_special_tokens=dict(named),
        clean_up_tokenization_spaces=False,
    )


def template(entry: str) -> str:
    return TEMPLATE.replace("ENTRY", entry)


def _qwen(name: str, patch: int) -> Any:
    names = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    tok = tokenizer(*names, {})
    images = transformers.Qwen2VLImageProcessor(
        patch_size=patch, min_pixels=patch * patch * 16, max_pixels=patch * patch * 336
    )
    if name == "Qwen3VL":
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor as Video
    else:
        from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor as Video
    return getattr(transformers, f"{name}Processor")(
        image_processor=images,
        tokenizer=tok,
        video_processor=Video(),
        chat_template=template(names[2] + names[0] + names[3]),
    )


def _glm(name: str, processor: str) -> Any:
    names = ("<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>")
    size = {"shortest_edge": 14 * 14 * 16, "longest_edge": 2 * 14 * 14 * 336}  # an image counts as two frames
    images = getattr(transformers, f"{processor}ImageProcessor")(size=size)
    module = __import__(f"transformers.models.{name}.video_processing_{name}", fromlist=["x"])
    return getattr(transformers, f"{processor}Processor")(
        image_processor=images,
        tokenizer=tokenizer(*names, {}, "<|begin_of_video|>", "<|end_of_video|>"),
        video_processor=getattr(module, f"{processor}VideoProcessor")(),
        chat_template=template(names[2] + names[0] + names[3]),
    )


def _gemma3() -> Any:
    named = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    lines = ["\n" * n for n in range(1, 5)]  # tokens of their own in Gemma's vocabulary, and vLLM asks for them
    tok = tokenizer("<image_soft_token>", "<video>", "<start_of_image>", "<end_of_image>", named, *lines)
    images = transformers.Gemma3ImageProcessor(size={"height": 32, "width": 32})
    return transformers.Gemma3Processor(images, tok, image_seq_length=4, chat_template=template("<start_of_image>"))


def _gemma4() -> Any:
    named = {
        "image_token": "<|image|>",
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "audio_token": "<|audio|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
    }
    tok = tokenizer("<|image|>", "<|video|>", "<|image>", "<image|>", named, "<|audio|>", "<|audio>", "<audio|>")
    images = transformers.Gemma4ImageProcessor(patch_size=4, max_soft_tokens=70)
    from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
    from transformers.models.gemma4.video_processing_gemma4 import Gemma4VideoProcessor

    return transformers.Gemma4Processor(
        Gemma4AudioFeatureExtractor(), images, tok, Gemma4VideoProcessor(), chat_template=template("<|image|>")
    )


def _internvl() -> Any:
    names = ("<IMG_CONTEXT>", "<video>", "<img>", "</img>")
    named = {
        "context_image_token": names[0],
        "video_token": names[1],
        "start_image_token": names[2],
        "end_image_token": names[3],
    }
    images = transformers.GotOcr2ImageProcessor(size={"height": 32, "width": 32}, max_patches=12, crop_to_patches=True)
    from transformers.models.internvl.video_processing_internvl import InternVLVideoProcessor

    return transformers.InternVLProcessor(
        images,
        tokenizer(*names, named),
        InternVLVideoProcessor(),
        image_seq_length=4,
        chat_template=template("<IMG_CONTEXT>"),
    )


def _idefics(name: str) -> Any:
    rows = [f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)]
    tok = tokenizer("<image>", "<video>", "<fake_token_around_image>", "<end_of_utterance>", {}, "<global-img>", *rows)
    images = getattr(transformers, f"{name}ImageProcessor")(
        size={"longest_edge": 128}, max_image_size={"longest_edge": 32}
    )
    more = {}
    if name == "SmolVLM":
        from transformers.models.smolvlm import processing_smolvlm
        from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor

        # A package that spells the number of a video's frames: without it not even images are processed.
        processing_smolvlm.num2words = processing_smolvlm.num2words or str
        more = {"video_processor": SmolVLMVideoProcessor()}
    return getattr(transformers, f"{name}Processor")(
        image_processor=images, tokenizer=tok, image_seq_len=4, chat_template=template("<image>"), **more
    )


def _minicpm() -> Any:
    named = {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "image_start_token": "<image>",
        "image_end_token": "</image>",
        "slice_start_token": "<slice>",
        "slice_end_token": "</slice>",
        "image_id_start_token": "<image_id>",
        "image_id_end_token": "</image_id>",
    }
    tok = tokenizer(*list(named.values())[:4], named, *list(named.values())[4:])
    images = transformers.MiniCPMV4_6ImageProcessor(patch_size=4, scale_resolution=64, max_slice_nums=9)
    from transformers.models.minicpmv4_6.video_processing_minicpmv4_6 import MiniCPMV4_6VideoProcessor

    return transformers.MiniCPMV4_6Processor(
        images, MiniCPMV4_6VideoProcessor(), tok, chat_template=template("<|image_pad|>")
    )


def _llava() -> Any:
    """A family that is not in the table of families: it takes the padded path."""
    images = transformers.CLIPImageProcessor(size={"height": 32, "width": 32}, do_center_crop=False)
    return transformers.LlavaProcessor(
        images,
        tokenizer("<image>", "<video>", "<start>", "<stop>", {}),
        patch_size=8,
        vision_feature_select_strategy="full",
        chat_template=template("<start><image><stop>"),
    )


PROCESSORS: dict[str, Callable[[], Any]] = {
    "qwen2_vl": lambda: _qwen("Qwen2VL", 14),
    "qwen2_5_vl": lambda: _qwen("Qwen2_5_VL", 14),
    "qwen3_vl": lambda: _qwen("Qwen3VL", 16),
    "qwen3_5": lambda: _qwen("Qwen3VL", 16),
    "glm4v": lambda: _glm("glm4v", "Glm4v"),
    "glm46v": lambda: _glm("glm46v", "Glm46V"),
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "internvl": _internvl,
    "idefics3": lambda: _idefics("Idefics3"),
    "smolvlm": lambda: _idefics("SmolVLM"),
    "minicpmv4_6": _minicpm,
    "llava": _llava,
}
"""Model type -> how to make its processor. Qwen3.5 uses Qwen3-VL's."""
SAME = {"qwen3_vl_moe": "qwen3_vl", "qwen3_5_moe": "qwen3_5", "gemma4_shared_kv": "gemma4"}
"""Models of tests/tinyfamilies.py that use the processor of another."""


def encoder_of(name: str) -> Encoder:
    """The encoder of a model of tests/tinyfamilies.py, over its real processor."""
    return Encoder(PROCESSORS[SAME.get(name, name)]())
