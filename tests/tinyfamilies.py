"""Tiny random models of every family, from their own configuration classes, with image tensors as their processors make
them. No file, no download. Small images are about 20 times smaller than large ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

IMAGE, VIDEO, START, END = 10, 11, 12, 13
TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 320, "max_position_embeddings": 2048, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
AXES = {"rope_type": "default", "rope_theta": 1e4}
TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}


@dataclass(frozen=True)
class TinyFamily:
    """One family.

    Args:
        model: float32, eval mode, weights that give clear preferences.
        picture: (large or not, generator) -> (image tensors of one image, its placeholder tokens with start and end).
        axes: along which axis of each image tensor images follow each other (0 where not named).
    """

    model: Any
    picture: Callable[[bool, torch.Generator], tuple[Mapping[str, Tensor], list[int]]]
    axes: Mapping[str, int]


def wake(model: Any, seed: int = 0) -> Any:
    """Weights spread as in a trained model: with transformers' 0.02 every token would be about equally likely, and a
    wrong mask would hide in the rounding."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if "embed_tokens" in name or "lm_head" in name:
                p.copy_(0.3 * noise)
            elif p.ndim >= 2:
                p.copy_(noise * (p.shape[-1] if p.ndim == 3 else p[0].numel()) ** -0.5)
            else:
                p.add_(0.1 * noise)
            # The chunked delta rule rounds: moved by 7 tokens within its chunks of 64, the stock forward itself changes
            # by up to 1.6e-5 with sharper weights than these. Smaller ones leave room to see mistakes.
            if "linear_attn" in name and p.ndim >= 2:
                p.mul_(0.5)
    return model.float().eval()


def _axes(*section: int, **more: Any) -> dict[str, Any]:
    """Rotary settings; `section` for heads that are 16 wide."""
    return {"rope_parameters": AXES | {"mrope_section": [n * TEXT["head_dim"] // 16 for n in section]} | more}


def _grid(name: str, text: dict[str, Any], vision: dict[str, Any], patch: int = 14, **more: Any) -> TinyFamily:
    """Families with `image_grid_thw`: 4 x 4 patches are 4 tokens, 16 x 20 patches 80."""
    config = getattr(transformers, f"{name}Config")(text_config=TEXT | text, vision_config=vision, **more)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)

    def picture(large: bool, g: torch.Generator) -> tuple[Mapping[str, Tensor], list[int]]:
        rows, columns = (16, 20) if large else (4, 4)
        pixels = torch.randn(rows * columns, 3 * 2 * patch * patch, generator=g)
        ids = [START, *[IMAGE] * (rows * columns // 4), END]
        return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, rows, columns]])}, ids

    return TinyFamily(wake(model), picture, {})


def _qwen2_vl() -> TinyFamily:
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14}
    return _grid("Qwen2VL", _axes(2, 3, 3), vision, **TOKENS, tie_word_embeddings=True)


def _qwen2_5_vl() -> TinyFamily:
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
              "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}  # fmt: skip
    return _grid("Qwen2_5_VL", _axes(2, 3, 3), vision, **TOKENS, tie_word_embeddings=True)


def _qwen3_vision() -> dict[str, Any]:
    return {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
            "patch_size": 16, "num_position_embeddings": 64}  # fmt: skip


def _qwen3_vl() -> TinyFamily:
    vision = _qwen3_vision() | {"deepstack_visual_indexes": [0, 1]}
    return _grid("Qwen3VL", _axes(2, 3, 3, mrope_interleaved=True), vision, 16, **TOKENS, tie_word_embeddings=False)


def _qwen3_vl_moe() -> TinyFamily:
    vision = _qwen3_vision() | {"deepstack_visual_indexes": [0, 1]}
    text = _axes(2, 3, 3, mrope_interleaved=True) | {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    }
    return _grid("Qwen3VLMoe", text, vision, 16, **TOKENS, tie_word_embeddings=True)


# Keys are 64 wide, 128 in released models: with 16 the chunked delta rule rounds too much in float32.
LINEAR = {
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}


def _hybrid_text() -> dict[str, Any]:
    return _axes(2, 1, 1, mrope_interleaved=True, partial_rotary_factor=0.5) | LINEAR


def _qwen3_5() -> TinyFamily:
    return _grid("Qwen3_5", _hybrid_text(), _qwen3_vision(), 16, **TOKENS, tie_word_embeddings=True)


def _qwen3_5_moe() -> TinyFamily:
    text = _hybrid_text() | {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    }
    return _grid("Qwen3_5Moe", text, _qwen3_vision(), 16, **TOKENS, tie_word_embeddings=True)


def _glm(name: str) -> TinyFamily:
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
              "patch_size": 14, "image_size": 112}  # fmt: skip
    text = _axes(1, 1, 2, partial_rotary_factor=0.5) | {"attention_bias": True}
    tokens = {
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "image_start_token_id": START,
        "image_end_token_id": END,
    }
    return _grid(name, text, vision, **tokens, tie_word_embeddings=False)


def _tiles(
    model: Any, tokens_per_tile: int, make: Callable[[Tensor], Mapping[str, Tensor]], axes: Mapping[str, int] | None
) -> TinyFamily:
    """Families that cut an image into tiles of 32 x 32 pixels: a small image is 1 tile, a large one 20."""

    def picture(large: bool, g: torch.Generator) -> tuple[Mapping[str, Tensor], list[int]]:
        tiles = 20 if large else 1
        pixels = torch.randn(tiles, 3, 32, 32, generator=g)
        return make(pixels), [START, *[IMAGE] * (tiles * tokens_per_tile), END]

    return TinyFamily(wake(model), picture, axes or {})


def _tower() -> dict[str, Any]:
    return VISION | {"num_hidden_layers": 2, "image_size": 32, "patch_size": 8}


def _gemma3() -> TinyFamily:
    text = TEXT | {
        "sliding_window": 12,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=_tower(),
        image_token_id=IMAGE,
        boi_token_index=START,
        eoi_token_index=END,
        mm_tokens_per_image=4,
    )
    model = wake(transformers.Gemma3ForConditionalGeneration(config))

    def picture(large: bool, g: torch.Generator) -> tuple[Mapping[str, Tensor], list[int]]:
        crops = 20 if large else 1  # pan and scan: a large image is many crops, each an image of its own
        ids = [START, IMAGE, IMAGE, IMAGE, IMAGE, END] * crops
        return {"pixel_values": torch.randn(crops, 3, 32, 32, generator=g)}, ids

    return TinyFamily(model, picture, {})


def _gemma4(bidirectional: str | None = "vision", shared: int = 0) -> TinyFamily:
    text = TEXT | {
        "num_hidden_layers": 4,
        "sliding_window": 12,
        "use_bidirectional_attention": bidirectional,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 320,
        "final_logit_softcapping": 3.0,
        "num_kv_shared_layers": shared,
    }
    vision = VISION | {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4,
                       "position_embedding_size": 32, "pooling_kernel_size": 3,
                       "default_output_length": 70}  # fmt: skip
    config = transformers.Gemma4Config(
        text_config=text,
        vision_config=vision,
        audio_config=None,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        boi_token_id=START,
        eoi_token_id=END,
        audio_token_id=14,
        boa_token_id=15,
        eoa_token_index=16,
    )
    model = wake(transformers.Gemma4ForConditionalGeneration(config))
    with torch.no_grad():  # its attention is not scaled; random sharp attention would amplify rounding
        for name, p in model.named_parameters():
            if name.endswith("q_norm.weight"):
                p.mul_(0.3)

    def picture(large: bool, g: torch.Generator) -> tuple[Mapping[str, Tensor], list[int]]:
        rows, columns = (12, 15) if large else (3, 3)  # 3 x 3 patches are pooled into a token; all padded to 180
        places = torch.full((180, 2), -1)
        at = torch.meshgrid(torch.arange(columns), torch.arange(rows), indexing="xy")
        places[: rows * columns] = torch.stack(at, -1).reshape(-1, 2)
        pixels = torch.rand(180, 3 * 4 * 4, generator=g) * (places[:, :1] >= 0)
        ids = [START, *[IMAGE] * (rows * columns // 9), END]
        return {"pixel_values": pixels[None], "image_position_ids": places[None]}, ids

    return TinyFamily(model, picture, {})


def _internvl() -> TinyFamily:
    vision = _tower() | {"image_size": [32, 32], "patch_size": [8, 8]}
    config = transformers.InternVLConfig(
        text_config=TEXT | {"model_type": "qwen2"},
        vision_config=vision,
        image_token_id=IMAGE,
        downsample_ratio=0.5,
        image_seq_length=4,
    )
    return _tiles(transformers.InternVLForConditionalGeneration(config), 4, lambda p: {"pixel_values": p}, None)


def _idefics(name: str) -> TinyFamily:
    config = getattr(transformers, f"{name}Config")(
        text_config=TEXT | {"model_type": "llama"},
        vision_config=_tower(),
        image_token_id=IMAGE,
        scale_factor=2,
        pad_token_id=0,
    )

    def make(pixels: Tensor) -> Mapping[str, Tensor]:
        return {"pixel_values": pixels[None], "pixel_attention_mask": torch.ones_like(pixels[None, :, 0]).long()}

    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    return _tiles(model, 4, make, {"pixel_values": 1, "pixel_attention_mask": 1})


def _minicpm() -> TinyFamily:
    rope = _axes(2, 1, 1, partial_rotary_factor=0.5)
    vision = VISION | {"num_hidden_layers": 3, "image_size": 112, "patch_size": 4, "insert_layer_id": 1}
    config = transformers.MiniCPMV4_6Config(
        text_config=TEXT | LINEAR | rope | {"model_type": "qwen3_5_text"},
        vision_config=vision,
        insert_layer_id=1,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        image_size=112,
    )
    model = wake(transformers.MiniCPMV4_6ForConditionalGeneration(config))

    def picture(large: bool, g: torch.Generator) -> tuple[Mapping[str, Tensor], list[int]]:
        rows, columns = (16, 20) if large else (4, 4)  # 4 x 4 patches are merged into a token
        pixels = torch.randn(1, 3, 4, rows * columns * 4, generator=g)
        ids = [START, *[IMAGE] * (rows * columns // 16), END]
        return {"pixel_values": pixels, "target_sizes": torch.tensor([[rows, columns]], dtype=torch.int32)}, ids

    return TinyFamily(model, picture, {"pixel_values": 3})


def _llava() -> TinyFamily:
    """A family that is not in the table: it takes the padded path."""
    vision = _tower() | {"model_type": "siglip_vision_model"}
    config = transformers.LlavaConfig(
        text_config=TEXT | {"model_type": "llama"},
        vision_config=vision,
        image_token_index=IMAGE,
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
    )
    return _tiles(transformers.LlavaForConditionalGeneration(config), 16, lambda p: {"pixel_values": p}, None)


def build(name: str, wide: bool = False) -> TinyFamily:
    """The same weights every time: some families draw a few of them from the global generator.

    Args: wide: with heads that are 32 wide, and half as many: vLLM has no kernels for narrower ones. And without
        SigLIP's pooling head, which published models of these families do not have.
    """
    narrow = dict(TEXT)
    if wide:
        TEXT.update(head_dim=32, num_attention_heads=2, num_key_value_heads=1)
        VISION["vision_use_head"] = False
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return BUILDERS[name]()
    finally:
        TEXT.update(narrow)
        VISION.pop("vision_use_head", None)


BUILDERS: dict[str, Callable[[], TinyFamily]] = {
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5_moe,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "gemma4_shared_kv": lambda: _gemma4(None, 2),
    "glm4v": lambda: _glm("Glm4v"),
    "glm46v": lambda: _glm("Glm46V"),
    "internvl": _internvl,
    "idefics3": lambda: _idefics("Idefics3"),
    "smolvlm": lambda: _idefics("SmolVLM"),
    "minicpmv4_6": _minicpm,
    "llava": _llava,
}
"""Name -> how to make it. Where a name has more than the model type, it is a variant of that family."""
