from __future__ import annotations

import io
import random

import numpy as np
import pytest
from PIL import Image

from vlmrl.tasks.taxonrl import specimens
from vlmrl.tasks.taxonrl.domains import DOMAINS
from vlmrl.tasks.taxonrl.specimens import SIDE, draw, draw_collection, taxonomy


def pixels(domain: str, traits: dict[str, str], seed: int = 0) -> np.ndarray:
    return np.asarray(draw(domain, traits, random.Random(seed))).astype(int)


def fungus(shape: str = "Con", colour: str = "rub", marking: str = "nuda", ending: str = "crassa") -> dict[str, str]:
    return dict(zip(("order", "family", "genus", "species"), taxonomy(shape, colour, marking, ending), strict=True))


@pytest.mark.parametrize("domain", ["fungi", "bird"])
def test_every_rank_changes_the_picture(domain: str) -> None:
    base = pixels(domain, fungus())
    assert base.shape == (SIDE, SIDE, 3)
    for other in (fungus("Glob"), fungus(colour="caer"), fungus(marking="puncta"), fungus(ending="gracilis")):
        assert (np.abs(pixels(domain, other) - base).max(axis=2) > 60).mean() > 0.003


@pytest.mark.parametrize("domain", [name for name, domain in DOMAINS.items() if domain.target == "individual"])
def test_two_individuals_with_the_same_facts_look_different(domain: str) -> None:
    facts = {"species": "Asterias rubens", "age_group": "Adult", "gender": "Male"}
    facts |= {"type": "Silverback"} if domain == "gorilla" else {}
    shown = [pixels(domain, {**facts, "individual": f"x{n}"}) for n in range(6)]
    for i in range(6):
        for j in range(i):
            assert np.abs(shown[i] - shown[j]).max() > 60


def test_names_are_made_of_the_traits() -> None:
    assert taxonomy("Con", "rub", "puncta", "crassa") == (
        "Conales",
        "Conrubaceae",
        "Conrubpuncta",
        "Conrubpuncta crassa",
    )


@pytest.mark.slow
def test_the_same_arguments_draw_the_same_pictures_and_no_two_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specimens, "IMAGES_OF_INDIVIDUAL", 2)
    images, files = draw_collection(DOMAINS["gorilla"], 40, seed=3)
    again, files_again = draw_collection(DOMAINS["gorilla"], 40, seed=3)
    assert files == files_again and images == again and len({one.media.sha256 for one in images}) == len(images) == 60
    assert draw_collection(DOMAINS["gorilla"], 40, seed=4)[1] != files
    assert Image.open(io.BytesIO(files[images[0].origin])).size == (SIDE, SIDE)
