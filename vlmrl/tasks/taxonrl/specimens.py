"""Drawn specimens for every domain. Visual traits determine the names, so a model can learn them without a download.

Fungi and birds: the shape determines the order, the colour the family, the marking the genus, and the stem or tail the
species. A name is made of the word stems of its traits (`Conrubpuncta crassa`: cone-shaped, red, dotted, thick).
Animals and faces: size, colour and form determine the age, type or species; each individual has a pattern of its own.
Position, size, tilt, light and background vary.
"""

from __future__ import annotations

import colorsys
import math
import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from vlmrl.data.images import encode_png, probe_image
from vlmrl.data.splits import LabelledImage
from vlmrl.tasks.taxonrl.domains import LAYOUTS, Domain
from vlmrl.types import hash64

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

SIDE = 112
"""Side of a picture in pixels: 16 image tokens."""
SCALE = 2
"""Pictures are drawn enlarged by this factor and then scaled down, which makes their edges smooth."""
SHAPES = ("Con", "Plan", "Glob", "Fun")
COLOURS = {"rub": (200, 45, 40), "aur": (235, 185, 40), "vir": (60, 150, 70), "caer": (60, 90, 200)}
MARKINGS = ("nuda", "puncta", "linea")
ENDINGS = ("gracilis", "crassa")
IMAGES_OF_SPECIES, IMAGES_OF_INDIVIDUAL = 20, 12
FEW_PAIRS = 1000
"""Number of training pairs below which a smaller taxonomy is used."""
DOT_PLACES = 9

Draw = Callable[[Any, Mapping[str, str], random.Random], None]


def draw_collection(domain: Domain, num_pairs: int, *, seed: int) -> tuple[list[LabelledImage], dict[str, bytes]]:
    """Draw enough images of a domain for `num_pairs` training pairs; return them, and origin -> file of each image.

    The same arguments give the same pictures.
    """
    images: list[LabelledImage] = []
    files: dict[str, bytes] = {}
    for labels, facts in _subjects(domain, num_pairs, seed):
        count = IMAGES_OF_SPECIES if domain.ranks else IMAGES_OF_INDIVIDUAL
        for number in range(count):
            origin = f"{'/'.join(labels)}/{number:02d}.png"
            traits = dict(zip(domain.ranks or ("individual",), labels, strict=True)) | facts
            data = encode_png(draw(domain.name, traits, random.Random(hash64(seed, origin))))
            files[origin] = data
            images.append(LabelledImage(probe_image(data)[0], labels, origin, None, facts))
    return images, files


def draw(domain: str, traits: Mapping[str, str], rng: random.Random) -> PILImage:
    """Draw one picture of a specimen, RGB, 112 x 112 pixels.

    Args:
        traits: the specimen's names, which determine its look.
    """
    from PIL import Image, ImageDraw, ImageFilter

    side = SIDE * SCALE
    ground = _hsv(rng.uniform(0.08, 0.6), rng.uniform(0.05, 0.25), rng.uniform(0.75, 0.95))
    page = Image.new("RGB", (side, side), ground)
    layer = Image.new("RGBA", (side, side), (0, 0, 0, 0))
    DRAWINGS[domain](ImageDraw.Draw(layer), traits, rng)
    zoom = rng.uniform(0.8, 1.0)
    layer = layer.resize((int(side * zoom), int(side * zoom)), Image.Resampling.BICUBIC)
    layer = layer.rotate(rng.uniform(-14, 14), Image.Resampling.BICUBIC, expand=False)
    room = side - layer.width
    page.paste(layer, (rng.randint(0, room), rng.randint(0, room)), layer)
    light = rng.uniform(0.85, 1.1)
    page = page.point([min(255, int(value * light)) for value in range(256)] * 3)
    return page.resize((SIDE, SIDE), Image.Resampling.LANCZOS).filter(ImageFilter.GaussianBlur(rng.uniform(0, 0.6)))


def _subjects(domain: Domain, num_pairs: int, seed: int) -> list[tuple[tuple[str, ...], dict[str, str]]]:
    """Return (labels, facts) of every species or individual."""
    few = num_pairs < FEW_PAIRS
    if domain.ranks:
        shapes, colours, markings = (3, 3, 2) if few else (len(SHAPES), len(COLOURS), len(MARKINGS))
        return [
            (taxonomy(shape, colour, marking, ending), {})
            for shape in SHAPES[:shapes]
            for colour in list(COLOURS)[:colours]
            for marking in MARKINGS[:markings]
            for ending in ENDINGS
        ]
    rng = random.Random(hash64(seed, "individuals"))
    subjects = []
    for number in range(max(30, min(400, num_pairs // 40))):
        vocabularies = LAYOUTS[domain.layout].vocabularies
        facts = {name: rng.choice(vocabularies[name].names) for name in domain.field_names if name in vocabularies}
        subjects.append(((f"{domain.subject.replace(' ', '_')}_{number:03d}",), facts))
    return subjects


def taxonomy(shape: str, colour: str, marking: str, ending: str) -> tuple[str, str, str, str]:
    """Return order, family, genus and species of a combination of traits.

    Example: Conales, Conrubaceae, Conrubpuncta, Conrubpuncta crassa.
    """
    genus = f"{shape}{colour}{marking}"
    return f"{shape}ales", f"{shape}{colour}aceae", genus, f"{genus} {ending}"


def _traits(names: Mapping[str, str]) -> tuple[str, tuple[int, int, int], str, str]:
    """Return the shape, colour, marking and ending (form of the stem or tail) that the names determine."""
    shape = names["order"].removesuffix("ales")
    colour = names["family"].removesuffix("aceae").removeprefix(shape)
    return shape, COLOURS[colour], names["genus"].removeprefix(shape + colour), names["species"].partition(" ")[2]


def _fungus(canvas: Any, names: Mapping[str, str], rng: random.Random) -> None:
    shape, colour, marking, ending = _traits(names)
    half = 26 if ending == "crassa" else 9
    canvas.polygon(
        [(112 - half, 205), (112 + half, 205), (112 + half * 0.7, 90), (112 - half * 0.7, 90)], (235, 225, 205)
    )
    outline = {
        "Con": [(112, 12), (178, 108), (46, 108)],
        "Plan": [(22, 70), (202, 70), (190, 104), (34, 104)],
        "Fun": [(28, 30), (196, 30), (132, 112), (92, 112)],
    }
    if shape == "Glob":
        canvas.ellipse((44, 18, 180, 118), colour)
    else:
        canvas.polygon(outline[shape], colour)
    places = (
        [(112, 52), (92, 84), (132, 84), (112, 98)] if shape == "Con" else [(80, 82), (112, 84), (144, 82), (112, 62)]
    )
    if shape == "Fun":
        places = [(70, 46), (112, 46), (154, 46), (112, 76)]
    _mark(canvas, marking, places, rng)


def _bird(canvas: Any, names: Mapping[str, str], rng: random.Random) -> None:
    shape, colour, marking, ending = _traits(names)
    long = ending == "gracilis"
    canvas.polygon([(66, 118), (66, 142), (8 if long else 38, 176 if long else 158), (20 if long else 36, 138)], colour)
    body = {
        "Con": (52, 76, 160, 170),
        "Plan": (40, 100, 180, 158),
        "Glob": (56, 66, 164, 182),
        "Fun": (60, 84, 140, 186),
    }
    canvas.ellipse(body[shape], colour)
    canvas.ellipse((128, 44, 186, 102), colour)
    beak = {
        "Con": [(180, 62), (214, 74), (180, 86)],
        "Plan": [(180, 68), (222, 66), (222, 80), (180, 82)],
        "Glob": [(180, 66), (198, 74), (180, 82)],
        "Fun": [(180, 66), (218, 102), (176, 84)],
    }
    canvas.polygon(beak[shape], (60, 50, 40))
    canvas.ellipse((158, 62, 170, 74), (10, 10, 10))
    for leg in (96, 118):
        canvas.line((leg, 168, leg, 206), (60, 50, 40), 5)
    _mark(canvas, marking, [(82, 120), (106, 116), (128, 124), (100, 142)], rng)


def _mark(canvas: Any, marking: str, places: list[tuple[int, int]], rng: random.Random) -> None:
    for x, y in places:
        dx, dy = rng.uniform(-4, 4), rng.uniform(-2, 2)
        if marking == "puncta":
            canvas.ellipse((x + dx - 8, y + dy - 8, x + dx + 8, y + dy + 8), (250, 250, 245))
        elif marking == "linea":
            canvas.line((x + dx - 16, y + dy, x + dx + 16, y + dy), (25, 20, 20), 7)


def _sea_star(canvas: Any, names: Mapping[str, str], rng: random.Random) -> None:
    slender = names["species"] == "Asterias rubens"
    inner, colour = (26, (215, 110, 60)) if slender else (62, (150, 130, 80))
    turn = rng.uniform(0, 2 * math.pi / 5)
    corners = [
        (112 + radius * math.sin(turn + i * math.pi / 5), 112 - radius * math.cos(turn + i * math.pi / 5))
        for i, radius in enumerate([102, inner] * 5)
    ]
    canvas.polygon(corners, colour)
    dots = _pattern(names, 15)
    for arm in range(5):
        angle = turn + arm * 2 * math.pi / 5
        for step in range(3):
            if dots >> (arm * 3 + step) & 1:
                x, y = 112 + (24 + 22 * step) * math.sin(angle), 112 - (24 + 22 * step) * math.cos(angle)
                canvas.ellipse((x - 6, y - 6, x + 6, y + 6), (250, 245, 230))


def _primate(canvas: Any, names: Mapping[str, str], rng: random.Random) -> None:
    stage = names.get("type") or names.get("age_group", "Adult")
    radius = {"Infant": 44, "Juvenile": 58, "SubAdult": 70, "Adult female": 70}.get(stage, 88)
    fur = (
        (150, 150, 150)
        if stage in ("Silverback", "Elderly")
        else (60, 45, 40)
        if "age_group" in names
        else (30, 30, 34)
    )
    face = (222, 170, 150) if stage == "Infant" else (120, 92, 76)
    for side in (-1, 1):
        x = 112 + side * radius * 0.95
        canvas.ellipse((x - radius * 0.3, 112 - radius * 0.35, x + radius * 0.3, 112 + radius * 0.25), face)
    canvas.ellipse((112 - radius, 112 - radius, 112 + radius, 112 + radius), fur)
    canvas.ellipse((112 - radius * 0.7, 112 - radius * 0.35, 112 + radius * 0.7, 112 + radius * 0.92), face)
    if stage == "Blackback":
        canvas.rectangle(
            (112 - radius * 0.7, 112 - radius * 0.42, 112 + radius * 0.7, 112 - radius * 0.26), (10, 10, 12)
        )
    if names.get("gender") == "Male":
        canvas.polygon(
            [(112 - radius * 0.3, 112 - radius * 0.95), (112 + radius * 0.3, 112 - radius * 0.95), (112, 16)], fur
        )
    for side in (-1, 1):
        x, y = 112 + side * radius * 0.3, 112 - radius * 0.08
        canvas.ellipse((x - 7, y - 7, x + 7, y + 7), (15, 12, 10))
    _dots(canvas, _pattern(names, DOT_PLACES), 112, 112 + radius * 0.42, radius * 0.24, (240, 225, 205))


def _person(canvas: Any, names: Mapping[str, str], rng: random.Random) -> None:
    code = _pattern(names, 24)
    skin = _hsv(0.07, 0.25 + 0.1 * (code & 3), 0.95 - 0.15 * (code >> 2 & 3))
    hair = _hsv((code >> 4 & 7) / 8, 0.6, 0.25 + 0.2 * (code >> 7 & 3))
    width = 54 + 8 * (code >> 9 & 3)
    long = 60 * (code >> 11 & 1)
    canvas.ellipse((112 - width - 10, 18, 112 + width + 10, 150 + long), hair)
    canvas.ellipse((112 - width, 44, 112 + width, 200), skin)
    eye = _hsv((code >> 12 & 7) / 8, 0.7, 0.6)
    for side in (-1, 1):
        x = 112 + side * width * 0.45
        canvas.ellipse((x - 10, 98, x + 10, 116), (250, 250, 250))
        canvas.ellipse((x - 6, 101, x + 6, 113), eye)
        if code >> 15 & 1:
            canvas.ellipse((x - 17, 90, x + 17, 124), None, (20, 20, 20), 4)
    nose = 8 + 5 * (code >> 16 & 3)
    canvas.polygon([(112, 112), (112 - nose, 146), (112 + nose, 146)], _hsv(0.06, 0.5, 0.6))
    mouth = 16 + 8 * (code >> 18 & 3)
    canvas.line((112 - mouth, 170, 112 + mouth, 170 - rng.randint(-5, 5)), (150, 50, 60), 7)


def _whale(canvas: Any, names: Mapping[str, str], rng: random.Random) -> None:
    code = _pattern(names, 18)
    canvas.rectangle((0, 150, 224, 224), (70, 120, 160))
    canvas.polygon([(100, 170), (124, 170), (120, 104), (104, 104)], (40, 48, 58))
    for side in (-1, 1):
        edge: list[tuple[float, float]] = [(112 + side * 104, 40)]
        for place in range(5):  # notches in the rear edge, one per bit of the pattern
            depth = 16 if code >> (place + (5 if side > 0 else 0)) & 1 else 0
            edge += [
                (112 + side * (88 - 16 * place), 52 + 4 * place),
                (112 + side * (80 - 16 * place), 54 + 4 * place + depth),
            ]
        canvas.polygon([*edge, (112, 78), (112, 136), (112 + side * 64, 112)], (40, 48, 58))
    _dots(canvas, code >> 10, 112, 104, 13, (225, 230, 235), columns=4)


def _dots(
    canvas: Any, code: int, x: float, y: float, step: float, colour: tuple[int, int, int], columns: int = 3
) -> None:
    radius = max(4.0, step * 0.32)
    for place in range(DOT_PLACES):
        if code >> place & 1:
            cx, cy = x + (place % columns - (columns - 1) / 2) * step, y + (place // columns - 1) * step
            canvas.ellipse((cx - radius, cy - radius, cx + radius, cy + radius), colour)


def _pattern(names: Mapping[str, str], bits: int) -> int:
    """Return an individual's pattern as a number of `bits` bits, always the same for an individual and never 0."""
    return hash64("pattern", names["individual"]) % ((1 << bits) - 1) + 1


def _hsv(hue: float, saturation: float, value: float) -> tuple[int, int, int]:
    red, green, blue = colorsys.hsv_to_rgb(hue % 1, min(1, saturation), min(1, max(0, value)))
    return int(255 * red), int(255 * green), int(255 * blue)


DRAWINGS: Mapping[str, Draw] = {
    "fungi": _fungus,
    "bird": _bird,
    "sea_star": _sea_star,
    "chimp": _primate,
    "gorilla": _primate,
    "human": _person,
    "whale": _whale,
}
