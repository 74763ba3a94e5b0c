"""Measures of figures in evaluations: by workers on pictures and code, and by models in folders made on the spot."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from picture_model_folders import tiny_models
from PIL import Image

from vlmrl.errors import CheckpointError, RecipeError
from vlmrl.model.picture_models import LEAST_SIDE, Lpips, PictureFeatures
from vlmrl.tasks.base import MeasureSettings
from vlmrl.tasks.vfig.grader import make_measurer
from vlmrl.tasks.vfig.measures import COSINES, NAMES, OFFLINE, FigureMeasurer, measures
from vlmrl.types import RewardInput

HEAD = '<svg xmlns="http://www.w3.org/2000/svg" width="64" height="64" viewBox="0 0 64 64">'
HALF = f'{HEAD}<rect width="32" height="64" fill="black"/></svg>'
"""Left half black, the rest white. It has no label: the published rules find no shape in it."""
TRUTH = {"svg": HALF, "width": 64, "height": 64}
EMPTY = f'{HEAD}<rect width="64" height="64" fill="white"/></svg>'


def parts(response: str, truth: str = HALF) -> dict[str, float | None]:
    result = make_measurer(pictures=False)(RewardInput(response, {**TRUTH, "svg": truth}))
    return dict(result.parts)


@pytest.mark.slow
def test_each_measure_is_given_three_ways():
    measurer = FigureMeasurer(MeasureSettings(OFFLINE))
    try:
        texts = (HALF, EMPTY, "I cannot", f"{HEAD}</svg>")
        itself, empty, none, bare = measurer.measure([RewardInput(text, TRUTH) for text in texts])
    finally:
        measurer.close()
    assert [one["rendered"] for one in (itself, empty, none)] == [1.0, 1.0, 0.0] and "rendered/valid" not in itself
    # There are 58 columns of windows of 7 x 7. In the 26 that lie in the white half the SSIM is 1, in the 26 of the
    # black half it is about 0, and in the 6 between small. So the mean is near 26 / 58 = 0.448.
    assert itself["ssim"] == itself["ssim/valid"] == 1.0 and empty["ssim"] == pytest.approx(0.448, abs=0.03)
    assert (none["ssim"], none["ssim/valid"], none["ssim/ceiling"]) == (0.0, None, 1.0)
    assert (none["clean"], none["clean/valid"], none["clean/ceiling"]) == (0.0, None, 1.0)
    # A page without a shape has no cleanliness of its own. Left out, it would be no worse than the mean of the others.
    for name in ("clean", "clean_published"):
        assert (bare[name], bare[f"{name}/valid"], bare[f"{name}/ceiling"]) == (0.0, None, pytest.approx(1.0, abs=1e-6))
    # The rules read neither shape nor arrow: 0 for shapes, and 1 for arrows by their definition; the mean is 0.5.
    assert [itself[f"rules{name}/ceiling"] for name in ("", "_shapes", "_arrows")] == [0.5, 0.0, 1.0]
    assert none["rules"] == 0.0 and none["rules/valid"] is None and measurer.absent == {}


def test_a_picture_of_another_shape_is_stretched_as_published():
    wide = HALF.replace('width="64" height="64" viewBox="0 0 64 64"', 'width="128" height="64" viewBox="0 0 128 64"')
    stretched = parts(wide.replace('width="32"', 'width="64"'))
    # Drawn at the size of the truth it would be letterboxed, with white above and below.
    assert stretched["ssim"] is not None and stretched["ssim"] > 0.95


def test_both_counts_of_cleanliness():
    gradient = f'{HEAD}<linearGradient id="a"/><rect width="9" height="9"/><path d="M20 20h20v20z"/></svg>'
    both = parts(gradient)
    # Published: a rect and "<line" of the gradient, of 3; ours: a rect and a path.
    assert both["clean_published"] == pytest.approx(2 / 3, abs=1e-6) and both["clean"] == 0.5


def test_hostile_code_is_not_drawn_and_counts_as_the_worst():
    assert parts(f'{HEAD}<image href="file:///etc/passwd" width="9" height="9"/></svg>') == {"rendered": 0.0}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> dict[str, str]:
    return tiny_models(tmp_path_factory.mktemp("models"))


@pytest.mark.slow
def test_cosines_of_models_and_their_mean(tiny):
    measurer = FigureMeasurer(MeasureSettings(("visual_sim", *COSINES), tiny, "cpu"))
    try:
        itself, empty, none = measurer.measure([RewardInput(text, TRUTH) for text in (HALF, EMPTY, "no")])
    finally:
        measurer.close()
    assert all(itself[name] == pytest.approx(1.0, abs=1e-5) for name in (*COSINES, "visual_sim"))
    assert all(itself[f"{name}/ceiling"] == pytest.approx(1.0, abs=1e-5) for name in COSINES)
    assert empty["visual_sim"] == pytest.approx(sum(empty[name] for name in COSINES) / 3)  # type: ignore[misc]
    assert any(empty[name] != pytest.approx(1.0, abs=1e-4) for name in COSINES)
    assert none["clip"] == 0.0 and none["clip/valid"] is None


@pytest.mark.parametrize("name", COSINES)
def test_a_cosine_is_that_of_the_published_vectors(tiny, name):
    from transformers import AutoImageProcessor, AutoModel

    pictures = [Image.new("RGB", (40, 30), colour) for colour in ("black", "orange")]
    model, processor = AutoModel.from_pretrained(tiny[name]).eval(), AutoImageProcessor.from_pretrained(tiny[name])
    pixels = processor(images=pictures, return_tensors="pt")["pixel_values"]
    with torch.no_grad():  # CLIP projects the pooler of its vision tower, the others have it as it is
        if name == "clip":
            vectors = model.visual_projection(model.vision_model(pixel_values=pixels).pooler_output)
        else:
            vectors = (model if name == "dino" else model.vision_model)(pixel_values=pixels).pooler_output
    wanted = torch.nn.functional.cosine_similarity(vectors[0], vectors[1], dim=0).item()
    features = PictureFeatures(tiny[name], COSINES[name][1], "cpu").of(pictures)  # type: ignore[arg-type]
    assert float(features[0] @ features[1]) == pytest.approx(wanted, abs=1e-5)


@pytest.mark.slow
def test_weights_that_are_not_there_are_named(tiny, tmp_path):
    settings = MeasureSettings(NAMES, {**tiny, "siglip": str(tmp_path / "none"), "lpips": str(tmp_path)}, "cpu")
    measurer = FigureMeasurer(settings)
    try:
        (one,) = measurer.measure([RewardInput(HALF, TRUTH)])
    finally:
        measurer.close()
    assert set(measurer.absent) == {"lpips", "siglip", "visual_sim"} and "siglip" in measurer.absent["visual_sim"]
    assert "no weights of AlexNet" in measurer.absent["lpips"] and str(tmp_path / "none") in measurer.absent["siglip"]
    assert not {"lpips", "siglip", "visual_sim"} & set(one) and one["clip"] == pytest.approx(1.0, abs=1e-5)


def test_a_folder_that_lacks_tensors_is_no_model(tiny, tmp_path):
    from safetensors.torch import load_file, save_file

    for file in Path(tiny["dino"]).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if k != "layernorm.weight"}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lack 1 tensors, such as `layernorm\.weight`"):
        PictureFeatures(str(tmp_path), "pooler", "cpu")


def test_only_the_published_file_is_read_of_those_that_are_pickled(tmp_path):
    (tmp_path / "alexnet-owt-7be5be79.pth").write_bytes(b"a pickle of somebody else")
    with pytest.raises(CheckpointError, match="is not torchvision's"):
        Lpips(str(tmp_path), "cpu")


def test_lpips_is_the_published_formula(tmp_path):
    package = pytest.importorskip("lpips")
    from safetensors.torch import save_file
    from torchvision.models import alexnet

    torch.manual_seed(3)
    features = alexnet(weights=None).features.eval()
    save_file({f"features.{k}": v for k, v in features.state_dict().items()}, tmp_path / "alexnet.safetensors")
    rng = np.random.default_rng(0)
    one, other = (rng.integers(0, 256, (LEAST_SIDE, 80, 3), dtype=np.uint8) for _ in range(2))
    lpips = Lpips(str(tmp_path), "cpu")
    linear = torch.load(Path(package.__file__).parent / "weights/v0.1/alex.pth", "cpu", weights_only=True)
    layers = []
    with torch.no_grad():
        for picture in (one, other):
            x = torch.from_numpy(picture).permute(2, 0, 1)[None].float() / 127.5 - 1
            x = (x - torch.tensor([-0.030, -0.088, -0.188])[:, None, None]) / torch.tensor([0.458, 0.448, 0.450])[
                :, None, None
            ]
            layers.append([])
            for number, layer in enumerate(features):
                x = layer(x)
                if number in (1, 4, 7, 9, 11):
                    layers[-1].append(x / x.square().sum(1, keepdim=True).sqrt())
        wanted = sum(
            ((a - b) ** 2 * linear[f"lin{k}.model.1.weight"]).sum(1).mean().item()
            for k, (a, b) in enumerate(zip(*layers, strict=True))
        )
    assert lpips.distance(one, other) == pytest.approx(wanted, rel=1e-4) and lpips.distance(one, one) == 0.0


def test_a_recipe_chooses_measures():
    known = measures()
    assert known.chosen(None, {}, "figures") == OFFLINE
    assert known.chosen(None, {"dino": "x"}, "figures") == tuple(n for n in NAMES if n in (*OFFLINE, "dino"))
    assert known.chosen(["rules", "ssim"], {}, "figures") == ("ssim", "rules") and known.chosen([], {}, "f") == ()
    assert known.chosen(["all"], {}, "figures") == NAMES
    with pytest.raises(RecipeError, match="unknown measure `sim`"):
        known.chosen(["sim"], {}, "figures")
    with pytest.raises(RecipeError, match=r"eval\.weights names `ssim`"):
        known.chosen(None, {"ssim": "x"}, "figures")
