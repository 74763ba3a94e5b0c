"""Models that compare pictures: cosines of image features (CLIP, DINO, SigLIP), and LPIPS. Loaded only if asked for."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.nn import functional

from vlmrl.errors import CheckpointError, VlmrlError, install_line
from vlmrl.model.load import pick_device
from vlmrl.model.model_facts import quiet_transformers
from vlmrl.model.model_files import require_source
from vlmrl.redaction.redact import first_line

Output = Literal["image_features", "pooler"]
"""Vector that stands for a picture: `get_image_features` of a model of image and text, or an image model's pooler."""
BATCH = 32
"""Number of pictures in a batch."""
ALEXNET = "alexnet-owt-7be5be79.pth"
"""Name of torchvision's file with the weights of AlexNet, in a folder and in the cache of torch's hub."""
PUBLISHED_SHA256 = ALEXNET.removesuffix(".pth").rpartition("-")[2]
"""Begin of the sha256 of that file, which its name holds."""


def use_one_thread() -> None:
    """Let this process compute with one thread."""
    torch.set_num_threads(1)


class PictureFeatures:
    """Model that makes one vector of a picture.

    Args:
        source: folder in the format of transformers, or model of the hub.
        output: what stands for a picture.
        device: as `model.device` of a recipe.
    Raises: CheckpointError if it cannot be loaded as a whole.
    """

    def __init__(self, source: str, output: Output, device: str = "auto") -> None:
        self._output, self._device = output, pick_device(device)
        self._model, self._processor = _loaded(source)
        if output == "image_features" and not hasattr(self._model, "get_image_features"):
            raise CheckpointError(f"the model in `{source}` has no image features: {type(self._model).__name__}")
        self._model.to(self._device)

    @torch.no_grad()
    def of(self, pictures: Sequence[Any]) -> np.ndarray:
        """Return one vector of length 1 per PIL image, [N, D] float32."""
        vectors = []
        for start in range(0, len(pictures), BATCH):
            batch = self._processor(images=list(pictures[start : start + BATCH]), return_tensors="pt")
            pixels = batch["pixel_values"].to(self._device)
            if self._output == "image_features":
                features = self._model.get_image_features(pixel_values=pixels)
                features = getattr(features, "pooler_output", features)  # newer versions return a whole output
            else:
                features = self._model(pixel_values=pixels).pooler_output
            vectors.append(functional.normalize(features.float(), dim=-1).cpu().numpy())
        return np.concatenate(vectors) if vectors else np.zeros((0, 0), np.float32)


def _loaded(source: str) -> tuple[Any, Any]:
    """Return (model, processor of images). Raises: CheckpointError, also if weights of the model are missing."""
    from transformers import AutoImageProcessor, AutoModel

    require_source(source)  # one short request, where the loaders would make many
    try:
        with quiet_transformers():
            processor = AutoImageProcessor.from_pretrained(source, trust_remote_code=False)
            model, report = AutoModel.from_pretrained(source, output_loading_info=True, trust_remote_code=False)
    except Exception as error:  # their errors about wrong files and about the network have no common class
        raise CheckpointError(f"no weights in `{source}`: {first_line(error, 160)}") from error
    missing = sorted(report.get("missing_keys") or ())
    if missing:
        raise CheckpointError(f"the weights in `{source}` lack {len(missing)} tensors, such as `{missing[0]}`")
    return model.eval(), processor


class Lpips:
    """LPIPS with AlexNet: a distance of pictures, >= 0, of the package `lpips`.

    Args:
        source: folder with torchvision's weights of AlexNet, or their file; "" = the cache of torch's hub.
        device: as `model.device` of a recipe.
    Raises: CheckpointError if the package or the weights are missing.
    Source: Zhang et al. 2018, "The Unreasonable Effectiveness of Deep Features as a Perceptual Metric", version 0.1.
    """

    def __init__(self, source: str = "", device: str = "auto") -> None:
        self._device = pick_device(device)
        features = _alexnet_features(source)  # before the package: it would download them
        try:
            import lpips  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise CheckpointError(f"the package `lpips` is not installed: {install_line('lpips')}") from None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the package names an argument of torchvision's as it was once called
            self._model = lpips.LPIPS(net="alex", pnet_rand=True, verbose=False)
        names = {
            name: f"net.slice{s}.{name}"
            for s in range(1, 6)
            for name in getattr(self._model.net, f"slice{s}").state_dict()
        }
        if missing := sorted(names.keys() - features.keys()):
            raise CheckpointError(
                f"the weights of AlexNet lack {len(missing)} tensors, such as `features.{missing[0]}`"
            )
        state = {own: features[name] for name, own in names.items()}
        try:
            self._model.load_state_dict(state, strict=False)
        except RuntimeError as error:
            raise CheckpointError(f"these are not the weights of AlexNet: {first_line(error, 160)}") from error
        self._model.eval().to(self._device)

    @torch.no_grad()
    def distance(self, one: np.ndarray, other: np.ndarray) -> float:
        """Return the distance of two pictures of one size, (height, width, 3) uint8, at least 64 x 64.

        Smaller ones are enlarged to that, as AlexNet needs it.
        """
        return float(self._model(self._tensor(one), self._tensor(other)).item())

    def _tensor(self, picture: np.ndarray) -> torch.Tensor:
        pixels = torch.from_numpy(np.array(picture)).to(self._device).permute(2, 0, 1)[None].float() / 127.5 - 1.0
        scale = LEAST_SIDE / min(pixels.shape[-2:])
        return pixels if scale <= 1 else functional.interpolate(pixels, scale_factor=scale, mode="bilinear")


LEAST_SIDE = 64
"""Shorter side to which pictures are enlarged for LPIPS, in pixels."""


def _alexnet_features(source: str) -> dict[str, torch.Tensor]:
    """Return the convolutions of AlexNet by their names within `features`. Raises: CheckpointError.

    Of the files in pickle's format, only the published one is read.
    """
    from safetensors.torch import load_file

    folder = Path(source).expanduser() if source else Path(torch.hub.get_dir()) / "checkpoints"
    files = [folder] if folder.is_file() else [folder / ALEXNET, *sorted(folder.glob("*.safetensors"))]
    file = next((one for one in files if one.is_file()), None)
    if file is None:
        where = f"`{source}`" if source else f"torch's cache ({folder})"
        raise CheckpointError(f"no weights of AlexNet in {where}: {ALEXNET} of torchvision, or a .safetensors file")
    try:
        state = load_file(file) if file.suffix == ".safetensors" else _published(file)
        return {k.removeprefix("features."): v for k, v in state.items() if k.startswith("features.")}
    except VlmrlError:
        raise
    except Exception as error:  # damaged files have errors of many classes
        raise CheckpointError(f"{file.name} cannot be read: {first_line(error, 160)}") from error


def _published(file: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of torchvision's own file. Raises: CheckpointError for another file, which is not opened."""
    if not hashlib.sha256(file.read_bytes()).hexdigest().startswith(PUBLISHED_SHA256):
        raise CheckpointError(f"{file.name} is not torchvision's: its sha256 does not begin with {PUBLISHED_SHA256}")
    return torch.hub.load_state_dict_from_url(
        f"file://{ALEXNET}", str(file.parent), "cpu", file_name=file.name, progress=False, weights_only=True
    )
