"""Pictures of one or two shapes and a digit, drawn by Pillow, with what is in them."""

from __future__ import annotations

import colorsys
import io
import math
from dataclasses import dataclass
from random import Random

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from . import digits

SHAPES = ("circle", "square", "triangle", "star", "cross", "heart")
ROOMY = {"circle": 0.6, "square": 0.65, "heart": 0.45}  # shapes with room for a digit, and the part that it takes
# name -> ranges of hue in degrees, saturation and value; names of CSS (orange, purple, navy) lie inside
COLOURS = {
    "red": ((-8, 8), (0.75, 1.0), (0.65, 1.0)),
    "orange": ((22, 39), (0.85, 1.0), (0.9, 1.0)),
    "yellow": ((49, 62), (0.65, 1.0), (0.88, 1.0)),
    "green": ((95, 150), (0.5, 1.0), (0.38, 1.0)),
    "blue": ((205, 242), (0.6, 1.0), (0.5, 1.0)),
    "purple": ((265, 301), (0.5, 1.0), (0.45, 0.85)),
    "pink": ((322, 350), (0.24, 0.62), (0.95, 1.0)),
    "black": ((0, 360), (0.0, 0.2), (0.0, 0.12)),
    "grey": ((0, 360), (0.0, 0.06), (0.42, 0.68)),
    "white": ((0, 360), (0.0, 0.03), (0.95, 1.0)),
}
NAMES = tuple(COLOURS)
RGB = tuple[int, int, int]
Point = tuple[float, float]
SIDE = 96  # pixels of a side of what the model sees
SHARES = (24, 34, 14, 12, 8, 8)  # of pictures with these things
LEAST_CONTRAST = 90.0  # distance of a thing's colour from what is behind it, of 441


@dataclass
class Thing:
    """A shape, or a digit, at a place of the picture; lengths are parts of its sides."""

    kind: str  # a shape, or "0" to "9"
    colour: str
    x: float = 0.5
    y: float = 0.5
    width: float = 0.3
    height: float = 0.3

    @property
    def is_digit(self) -> bool:
        return self.kind.isdigit()


@dataclass
class Picture:
    """A picture, and what is in it. The digit comes last."""

    image: Image.Image
    things: list[Thing]
    background: str = ""  # its colour; "" if it has none of the names

    @property
    def shapes(self) -> list[Thing]:
        return [thing for thing in self.things if not thing.is_digit]

    @property
    def digit(self) -> Thing | None:
        return next((thing for thing in self.things if thing.is_digit), None)

    def seen(self) -> Image.Image:
        """Returns the picture as the model's processor scales it."""
        return self.image.resize((SIDE, SIDE), Image.Resampling.BICUBIC)


def colour_of(name: str, rng: Random) -> RGB:
    """Returns a colour that has this name."""
    (low, high), saturation, value = COLOURS[name]
    pure = rng.random() < 0.3  # such as (255, 0, 0)
    hue = rng.uniform(low, high) % 360 / 360
    s = saturation[1] if pure else rng.uniform(*saturation)
    v = (value[0] if name == "black" else value[1]) if pure else rng.uniform(*value)
    red, green, blue = colorsys.hsv_to_rgb(hue, s, v)
    return round(red * 255), round(green * 255), round(blue * 255)


def distance(one: RGB, other: RGB) -> float:
    return math.dist(one, other)


def polygon(kind: str, rng: Random) -> list[Point]:
    """Returns the outline of a shape in a box from -1 to 1, turned at random as far as its name allows."""
    if kind == "circle":
        points = [(math.cos(a / 24 * math.pi), math.sin(a / 24 * math.pi)) for a in range(48)]
        return points
    if kind == "square":
        points, turn = [(-1.0, -1.0), (1.0, -1.0), (1.0, 1.0), (-1.0, 1.0)], rng.choice((0, 0, 0, 6, 20, 45))
    elif kind == "triangle":
        top = rng.choice((0.0, 0.0, 0.0, rng.uniform(-1, 1)))
        points, turn = [(top, -1.0), (1.0, 1.0), (-1.0, 1.0)], rng.choice((0, 0, 0, 10, 30, 90, 180, 180))
    elif kind == "star":
        inner = rng.uniform(0.36, 0.5)
        spans = [(1.0 if a % 2 == 0 else inner, math.pi * (a / 5 - 0.5)) for a in range(10)]
        points, turn = [(r * math.cos(a), r * math.sin(a)) for r, a in spans], rng.choice((0, 0, 0, 8, 18, 36))
    elif kind == "cross":
        w = rng.uniform(0.18, 0.38)
        points = [(-w, -1.0), (w, -1.0), (w, -w), (1.0, -w), (1.0, w), (w, w)]
        points, turn = points + [(-x, -y) for x, y in points], rng.choice((0, 0, 0, 6, 45))
    else:  # heart
        spans = [a / 24 * math.pi for a in range(48)]
        points = [
            (math.sin(t) ** 3, -(13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)) / 16.5)
            for t in spans
        ]
        turn = rng.choice((0, 0, 0, 8))
    angle = math.radians(turn * rng.choice((-1, 1)) + (rng.gauss(0, 2) if rng.random() < 0.5 else 0))
    cos, sin = math.cos(angle), math.sin(angle)
    return [(x * cos - y * sin, x * sin + y * cos) for x, y in points]


def paint(image: Image.Image, thing: Thing, colour: RGB, rng: Random, files: tuple[str, ...] = ()) -> None:
    """Draws a thing into its box, and sets the box to what was drawn."""
    wide, high = image.size
    left, top = (thing.x - thing.width / 2) * wide, (thing.y - thing.height / 2) * high
    width, height = thing.width * wide, thing.height * high
    if thing.is_digit:
        mask = digits.drawn(int(thing.kind), rng, files)
        scale = min(height / mask.height, width / mask.width)
        mask = mask.resize((max(1, round(mask.width * scale)), max(1, round(mask.height * scale))))
        corner = (round(left + (width - mask.width) / 2), round(top + (height - mask.height) / 2))
        image.paste(colour, (*corner, corner[0] + mask.width, corner[1] + mask.height), mask)
        thing.width, thing.height = mask.width / wide, mask.height / high
        return
    points = polygon(thing.kind, rng)
    spread_x, spread_y = (max(abs(point[axis]) for point in points) for axis in (0, 1))
    spots = [(left + width / 2 * (1 + x / spread_x), top + height / 2 * (1 + y / spread_y)) for x, y in points]
    pen, style = ImageDraw.Draw(image), rng.random()
    thick = max(1, round(min(width, height) * rng.uniform(0.06, 0.16)))
    if style < 0.2 and min(width, height) > 24:  # an outline alone
        pen.line([*spots, spots[0], spots[1]], fill=colour, width=thick, joint="curve")
        return
    pen.polygon(spots, fill=colour)
    if style < 0.35:  # with a thin line around
        edge = rng.choice(((0, 0, 0), tuple(round(part * 0.6) for part in colour)))
        pen.line([*spots, spots[0]], fill=edge, width=max(1, thick // 4))


def backdrop(size: tuple[int, int], rng: Random) -> tuple[Image.Image, str, list[RGB]]:
    """Returns an empty picture, the name of its colour, and its colours."""
    style = rng.random()
    name = rng.choices(("white", "black", "grey", "any"), (50, 12, 5, 33))[0]
    if name == "any":
        name = rng.choice(NAMES)
        colour = colour_of(name, rng)
    else:
        colour = colour_of(name, rng)
    if style < 0.12:  # a pale colour, which has no name here
        pale = colorsys.hsv_to_rgb(rng.random(), rng.uniform(0.06, 0.3), rng.uniform(0.75, 1))
        colour, name = tuple(round(part * 255) for part in pale), ""
    image = Image.new("RGB", size, colour)
    if style > 0.9:  # from one shade to another
        other: RGB = tuple(max(0, min(255, part + rng.randint(-50, 50))) for part in colour)
        ramp = Image.linear_gradient("L").rotate(rng.choice((0, 90, 180, 270))).resize(size)
        image.paste(other, (0, 0, *size), ramp)
        return image, "", [colour, other]
    if style > 0.84:  # lines of paper
        pen, gap = ImageDraw.Draw(image), max(6, round(min(size) * rng.uniform(0.06, 0.15)))
        line: RGB = tuple(part - 45 if part > 100 else part + 45 for part in colour)
        for at in range(gap, size[1], gap):
            pen.line((0, at, size[0], at), fill=line)
        if rng.random() < 0.5:
            for at in range(gap, size[0], gap):
                pen.line((at, 0, at, size[1]), fill=line)
    return image, name, [colour]


def _size(rng: Random) -> tuple[int, int]:
    """Returns a picture's width and height; the larger ones are drawn less often, since they take longer."""
    short = rng.choice((64, 96, 100, 128, 150, 200, 224, 256, round(math.exp(rng.uniform(4.2, 6.2)))))
    long = round(short * rng.choice((1, 1, 1, 4 / 3, 3 / 2, 16 / 9, rng.uniform(1, 2))))
    return (long, short) if rng.random() < 0.65 else (short, long)


def _overlap(one: Thing, other: Thing) -> bool:
    return (
        abs(one.x - other.x) < (one.width + other.width) / 2 + 0.02
        and abs(one.y - other.y) < (one.height + other.height) / 2 + 0.02
    )


def _ambiguous(things: list[Thing]) -> bool:
    """Returns whether two shapes lie so diagonally that neither left nor above comes first."""
    shapes = [thing for thing in things if not thing.is_digit]
    if len(shapes) < 2:
        return False
    dx, dy = abs(shapes[0].x - shapes[1].x), abs(shapes[0].y - shapes[1].y)
    return max(dx, dy) < 0.2 or 0.75 < dx / max(dy, 1e-6) < 1.33


def place(things: list[Thing], size: tuple[int, int], rng: Random, least: float = 0.24) -> bool:
    """Gives things boxes that do not overlap, of this part of the shorter side at least. Returns whether it could."""
    short = min(size)
    largest = {1: 0.9, 2: 0.48, 3: 0.4}[len(things)]
    for thing in things:
        side = rng.uniform(least, largest) * short
        stretch = rng.choice((1, 1, rng.uniform(0.75, 1.3))) if not thing.is_digit else 1
        thing.width, thing.height = side / size[0] * min(1, stretch), side / size[1] * min(1, 1 / stretch)
        thing.x = rng.uniform(thing.width / 2, 1 - thing.width / 2)
        thing.y = rng.uniform(thing.height / 2, 1 - thing.height / 2)
    pairs = [(one, other) for index, one in enumerate(things) for other in things[:index]]
    return not any(_overlap(*pair) for pair in pairs) and not _ambiguous(things)


def order(things: list[Thing]) -> list[Thing]:
    """Returns shapes from left to right, or from above where they stand upon each other, and then the digit."""
    shapes = [thing for thing in things if not thing.is_digit]
    if len(shapes) == 2:
        across = abs(shapes[0].x - shapes[1].x) > abs(shapes[0].y - shapes[1].y)
        shapes.sort(key=lambda thing: thing.x if across else thing.y)
    return shapes + [thing for thing in things if thing.is_digit]


def worn(image: Image.Image, rng: Random) -> Image.Image:
    """Returns a picture as cameras and files change it: blurred, noisy, lighter or darker, as JPEG."""
    if rng.random() < 0.12:
        image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 1) * min(image.size) / 96))
    if rng.random() < 0.25:
        noise = np.random.default_rng(rng.getrandbits(32)).normal(0, rng.uniform(2, 18), (*image.size[::-1], 3))
        image = Image.fromarray((np.asarray(image) + noise).clip(0, 255).astype(np.uint8))
    if rng.random() < 0.2:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=rng.randint(40, 92))
        image = Image.open(file).convert("RGB")
    return image


def draw(rng: Random, files: tuple[str, ...] = (), easy: bool = False) -> Picture:
    """Draws a picture. `files`: fonts of its digit; all ways to write one if there are none. `easy`: of one large
    thing."""
    layout = rng.choices(("s", "ss", "d", "sd", "ssd", "inside"), (45, 0, 55, 0, 0, 0) if easy else SHARES)[0]
    inside = layout == "inside"
    kinds = [rng.choice(tuple(ROOMY) if inside else SHAPES) for each in ("s" if inside else layout) if each == "s"]
    digit = [str(rng.randrange(10))] if inside or "d" in layout else []
    size = _size(rng)
    scale = 2 if max(size) <= 256 and rng.random() < 0.6 else 1  # drawn larger, for smooth edges
    image, name, behind = backdrop((size[0] * scale, size[1] * scale), rng)
    painted: list[tuple[Thing, RGB]] = []
    for kind in kinds + digit:
        around = behind + [painted[0][1]] if inside and painted else behind
        while True:
            colour_name = rng.choice(NAMES)
            colour = colour_of(colour_name, rng)
            twins = any(thing.kind == kind and thing.colour == colour_name for thing, _ in painted)
            if min(distance(colour, other) for other in around) > LEAST_CONTRAST and not twins:
                break
        painted.append((Thing(kind, colour_name), colour))
    things = [thing for thing, _ in painted]
    if inside:
        while not place(things[:1], size, rng) or min(things[0].width * size[0], things[0].height * size[1]) < 40:
            size = (size[0] + 8, size[1] + 8)
        image = image.resize((size[0] * scale, size[1] * scale))
        shape, number = things
        number.x, number.y = shape.x, shape.y
        number.width, number.height = shape.width * ROOMY[shape.kind], shape.height * ROOMY[shape.kind]
    else:
        while not place(things, size, rng, 0.5 if easy else 0.24):
            pass
    for thing, colour in painted:
        paint(image, thing, colour, rng, files)
    image = worn(image.resize(size, Image.Resampling.LANCZOS) if scale > 1 else image, rng)
    return Picture(image, order(things), name)
