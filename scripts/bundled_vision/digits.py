"""Digits as grey masks: strokes with the wobble of a hand, seven segments, and fonts."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from random import Random

from PIL import Image, ImageDraw, ImageFont

Point = tuple[float, float]
SIDE = 128  # pixels of a mask, before it is cut to the digit and scaled
# strokes through points of a box of 1 x 1; several ways to write a digit
STROKES: dict[int, list[list[list[Point]]]] = {
    0: [[[(0.5, 0), (0.15, 0.2), (0.1, 0.5), (0.2, 0.85), (0.5, 1), (0.8, 0.85), (0.9, 0.5), (0.8, 0.15), (0.5, 0)]]],
    1: [
        [[(0.5, 0), (0.5, 0.5), (0.5, 1)]],
        [[(0.25, 0.25), (0.4, 0.12), (0.55, 0), (0.55, 0.5), (0.55, 1)]],
        [[(0.25, 0.25), (0.4, 0.12), (0.5, 0), (0.5, 0.5), (0.5, 1)], [(0.25, 1), (0.5, 1), (0.75, 1)]],
    ],
    2: [[[(0.12, 0.25), (0.3, 0.03), (0.6, 0), (0.85, 0.2), (0.75, 0.45), (0.4, 0.75), (0.1, 1)],
         [(0.1, 1), (0.5, 1), (0.9, 1)]]],
    3: [
        [[(0.12, 0.12), (0.45, 0), (0.8, 0.12), (0.8, 0.35), (0.4, 0.48)],
         [(0.4, 0.48), (0.8, 0.6), (0.88, 0.82), (0.5, 1), (0.1, 0.88)]],
        [[(0.12, 0), (0.5, 0), (0.85, 0)], [(0.85, 0), (0.6, 0.22), (0.4, 0.42)],
         [(0.4, 0.42), (0.8, 0.52), (0.88, 0.78), (0.5, 1), (0.1, 0.9)]],
    ],
    4: [
        [[(0.65, 0), (0.35, 0.35), (0.08, 0.68)], [(0.08, 0.68), (0.5, 0.68), (0.95, 0.68)],
         [(0.68, 0), (0.68, 0.5), (0.68, 1)]],
        [[(0.15, 0), (0.12, 0.3), (0.12, 0.55)], [(0.12, 0.55), (0.5, 0.55), (0.92, 0.55)],
         [(0.75, 0.1), (0.72, 0.55), (0.7, 1)]],
    ],
    5: [[[(0.82, 0), (0.5, 0), (0.2, 0)], [(0.2, 0), (0.17, 0.22), (0.15, 0.45)],
         [(0.15, 0.45), (0.5, 0.37), (0.85, 0.52), (0.88, 0.8), (0.5, 1), (0.1, 0.92)]]],
    6: [[[(0.75, 0.02), (0.35, 0.25), (0.13, 0.65), (0.3, 0.96), (0.6, 1), (0.88, 0.8), (0.75, 0.52), (0.45, 0.48),
          (0.15, 0.7)]]],
    7: [
        [[(0.1, 0), (0.5, 0), (0.9, 0)], [(0.9, 0), (0.6, 0.45), (0.4, 1)]],
        [[(0.1, 0), (0.5, 0), (0.9, 0)], [(0.9, 0), (0.6, 0.45), (0.4, 1)], [(0.3, 0.5), (0.55, 0.48), (0.8, 0.47)]],
    ],
    8: [[[(0.5, 0.47), (0.2, 0.32), (0.2, 0.1), (0.5, 0), (0.8, 0.1), (0.8, 0.32), (0.5, 0.47), (0.12, 0.7),
          (0.2, 0.93), (0.5, 1), (0.8, 0.93), (0.88, 0.7), (0.5, 0.47)]]],
    9: [
        [[(0.85, 0.3), (0.6, 0.52), (0.25, 0.48), (0.12, 0.2), (0.45, 0), (0.8, 0.1), (0.86, 0.35), (0.75, 0.7),
          (0.5, 1)]],
        [[(0.85, 0.25), (0.6, 0.5), (0.25, 0.48), (0.12, 0.2), (0.45, 0), (0.8, 0.1), (0.85, 0.25)],
         [(0.85, 0.1), (0.85, 0.55), (0.83, 1)]],
    ],
}  # fmt: skip
CORNERS: list[Point] = [(0, 0), (1, 0), (1, 0.5), (1, 1), (0, 1), (0, 0.5)]
SEGMENTS = {"a": (0, 1), "b": (1, 2), "c": (2, 3), "d": (3, 4), "e": (4, 5), "f": (5, 0), "g": (5, 2)}
LIT = ("abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcdfg")  # by digit


def smooth(points: list[Point], steps: int = 8) -> list[Point]:
    """Returns points of the Catmull-Rom curve through the given ones."""
    padded = [points[0], *points, points[-1]]
    curve = []
    for before, start, end, after in zip(padded, padded[1:], padded[2:], padded[3:], strict=False):
        for step in range(steps):
            t = step / steps
            weights = (-t + 2 * t**2 - t**3, 2 - 5 * t**2 + 3 * t**3, t + 4 * t**2 - 3 * t**3, t**3 - t**2)
            points4 = (before, start, end, after)
            x, y = (sum(w * p[axis] for w, p in zip(weights, points4, strict=True)) / 2 for axis in (0, 1))
            curve.append((x, y))
    return [*curve, points[-1]]


def draw_lines(lines: list[list[Point]], width: float, aspect: float, round_ends: bool = True) -> Image.Image:
    """Returns a mask of lines through a box of 1 x 1, `width` of its height thick."""
    mask = Image.new("L", (SIDE * 2, SIDE * 2))
    pen, radius = ImageDraw.Draw(mask), width * SIDE / 2
    for line in lines:
        spots = [(SIDE + (x - 0.5) * SIDE * aspect, SIDE / 2 + y * SIDE) for x, y in line]
        pen.line(spots, fill=255, width=max(1, round(2 * radius)), joint="curve")
        for x, y in spots if round_ends else ():
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=255)
    return mask


def handwritten(digit: int, rng: Random) -> Image.Image:
    """Returns a digit of strokes whose points are moved at random."""
    wobble = rng.uniform(0, 0.05)
    strokes = rng.choice(STROKES[digit])
    moved: dict[Point, Point] = {}  # strokes that meet still meet
    for point in (point for stroke in strokes for point in stroke):
        moved.setdefault(point, (point[0] + rng.gauss(0, wobble), point[1] + rng.gauss(0, wobble)))
    lines = [smooth([moved[point] for point in stroke]) for stroke in strokes]
    return draw_lines(lines, rng.uniform(0.05, 0.18), rng.uniform(0.45, 0.8))


def segmented(digit: int, rng: Random) -> Image.Image:
    """Returns a digit of a display of seven segments."""
    lines = [[CORNERS[end] for end in SEGMENTS[name]] for name in LIT[digit]]
    return draw_lines(lines, rng.uniform(0.08, 0.17), rng.uniform(0.45, 0.65), rng.random() < 0.5)


@lru_cache(maxsize=64)
def _font(file: str, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(file, size) if file else ImageFont.load_default(size)


def printed(digit: int, rng: Random, file: str = "") -> Image.Image:
    """Returns a digit of a font file, or of Pillow's own font, with strokes made thicker at random."""
    mask = Image.new("L", (SIDE * 2, SIDE * 2))
    thicker = rng.choice((0, 0, 1, 2, 4, 6))
    place = (SIDE, SIDE)
    ImageDraw.Draw(mask).text(place, str(digit), 255, _font(file, SIDE), anchor="mm", stroke_width=thicker)
    return mask


def drawn(digit: int, rng: Random, files: tuple[str, ...] = ()) -> Image.Image:
    """Returns the mask of a digit, cut to its box: in a font of `files`, if there are any, or in any way."""
    ways: list[tuple[Callable[..., Image.Image], float]] = [(handwritten, 0.5), (printed, 0.38), (segmented, 0.12)]
    if files:
        mask = printed(digit, rng, rng.choice(files))
    else:
        way = rng.choices([way for way, _ in ways], [share for _, share in ways])[0]
        mask = way(digit, rng)
    slant, turn = rng.gauss(0, 0.1), math.radians(rng.gauss(0, 5))
    stretch = rng.uniform(0.85, 1.2)
    cos, sin, half = math.cos(turn), math.sin(turn), SIDE
    matrix = (cos * stretch, sin + slant, 0.0, -sin * stretch, cos, 0.0)
    a, b, _, d, e, _ = matrix
    matrix = (a, b, half - a * half - b * half, d, e, half - d * half - e * half)
    mask = mask.transform(mask.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)
    return mask.crop(mask.getbbox())
