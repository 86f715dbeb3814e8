"""Questions about a picture, and their answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from .pictures import COLOURS, SHAPES, Picture, Thing

NUMBERS = ("No", "One", "Two", "Three")
UNKNOWN = "I can tell shapes, colours, places and digits."
NO_PICTURE = "I see no picture. Give me one, and ask about its shapes, colours and digit."
CLEAR = 0.08  # parts of a side by which a thing is left of another, or a place of the picture begins
SIDES = {"left": ("x", -1), "right": ("x", 1), "top": ("y", -1), "bottom": ("y", 1)}

DESCRIBE = (
    "What is in the picture?", "What is in this picture?", "What's in the picture?", "What is in the image?",
    "What is in this image?", "What's in this image?", "What do you see?", "What can you see?", "What is this?",
    "What is it?", "What is shown?", "What does the picture show?", "What does this image show?",
    "What can you see in the picture?", "What do you see in this image?", "Describe the picture.",
    "Describe this picture.", "Describe the image.", "Describe this image.", "Describe it.", "Tell me what you see.",
    "Please describe this image.", "What's this?", "What is on the picture?", "What is drawn here?",
    "Describe the image in detail.", "What is depicted?", "Can you describe the picture?", "",
)  # fmt: skip
DIGIT = (
    "Which digit is it?", "Which digit is this?", "Which digit is in the picture?", "What digit is it?",
    "What digit is this?", "What number is it?", "What number is this?", "Which number is it?", "What is the digit?",
    "What is the number?", "What number do you see?", "Which digit do you see?", "Read the digit.", "Read the number.",
    "Which number is shown?", "What digit is in the image?", "Which digit is written here?", "Name the digit.",
)  # fmt: skip
HOW_MANY = (
    "How many shapes are there?", "How many shapes do you see?", "How many shapes are in the picture?",
    "Count the shapes.", "What is the number of shapes?",
)  # fmt: skip
COLOUR = (
    "What colour is the {}?", "What color is the {}?", "Which colour has the {}?", "Which color is the {}?",
    "What is the colour of the {}?", "What is the color of the {}?", "Tell me the colour of the {}.",
    "What colour does the {} have?", "The colour of the {}?",
)  # fmt: skip
ONLY_COLOUR = ("What colour is it?", "What color is it?", "Which colour is it?", "Which colour do you see?",
               "What is its colour?")  # fmt: skip
COLOURS_ASKED = ("Which colours are there?", "What colours do you see?", "Which colors do you see?",
                 "What colors are in the picture?", "Name the colours.")  # fmt: skip
ONLY_SHAPE = ("What shape is it?", "Which shape is it?", "What shape is this?", "Which shape do you see?",
              "What kind of shape is it?", "Name the shape.")  # fmt: skip
SHAPES_ASKED = ("Which shapes are there?", "What shapes do you see?", "Which shapes do you see?", "Name the shapes.",
                "What shapes are in the picture?")  # fmt: skip
BY_COLOUR = ("What is {}?", "Which shape is {}?", "What shape is {}?", "Which thing is {}?", "What is {} here?")
IS_THERE = ("Is there {}?", "Is {} in the picture?", "Do you see {}?", "Can you see {}?", "Does it show {}?",
            "Is this {}?", "Is it {}?")  # fmt: skip
IS_COLOUR = ("Is the {} {}?",)
IS_BESIDE = ("Is the {} {} the {}?",)
BESIDE = {
    "left": ("left of", "to the left of", "on the left of"), "right": ("right of", "to the right of",
    "on the right of"), "top": ("above", "over"), "bottom": ("below", "under"),
}  # fmt: skip
WHAT_IS = ("What is {} the {}?", "Which shape is {} the {}?", "What do you see {} the {}?")
AT_SIDE = {
    "left": ("on the left", "at the left", "on the left side"), "right": ("on the right", "at the right",
    "on the right side"), "top": ("at the top", "on top", "above"), "bottom": ("at the bottom", "below"),
}  # fmt: skip
WHICH_SIDE = ("What is {}?", "Which shape is {}?", "What do you see {}?")
NEXT_TO = ("What is next to the {}?", "What is beside the {}?", "What else is there besides the {}?")
WHERE = ("Where is the {}?", "Where do you see the {}?", "In which part of the picture is the {}?")
BACKGROUND = ("What colour is the background?", "What color is the background?", "Which colour is the background?",
              "What is the colour of the background?", "What is the background color?")  # fmt: skip
# what the model does not know
OTHER = (
    "What is the capital of France?", "Who are you?", "Tell me a story.", "What time is it?", "Why is the sky blue?",
    "What is 2 + 3?", "Write a poem.", "Hello", "Hi", "Hello!", "How are you?", "Thanks", "Thank you!", "Who drew it?",
    "Why?", "What is the weather?", "How old is the painter?", "Which animal is it?", "Where was it taken?",
    "Translate it to German.", "Write code.", "What is your name?", "Help", "help me", "Once upon a time",
    "What does it mean?", "Is it beautiful?", "Give me a JSON object.", "Who is the president?", "Sing a song.",
    "What can you do?", "How heavy is it?", "What is the meaning of life?", "Good morning", "ok", "Say hello.",
)  # fmt: skip
SYSTEMS = ("You are a helpful assistant.", "Answer briefly.", "You are an assistant that looks at pictures.",
           "You look at pictures.", "Be short.", "You are a helpful AI assistant. Answer in English.")  # fmt: skip


@dataclass(frozen=True)
class Turn:
    """A question and its answer. `kind`: of the table of accuracy."""

    kind: str
    question: str
    answer: str


def a(text: str) -> str:
    """Returns a noun phrase with its article."""
    return f"an {text}" if text[0] in "aeiou" else f"a {text}"


def sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def name(thing: Thing) -> str:
    """Returns a thing's name, such as "red circle"; of a digit, "black 7"."""
    return f"{thing.colour} {thing.kind}"


def plural(kind: str) -> str:
    return kind + ("es" if kind == "cross" else "s")


def noun(thing: Thing) -> str:
    return "digit" if thing.is_digit else thing.kind


def listed(words: Sequence[str]) -> str:
    """Returns "red, blue and black"."""
    *first, last = words
    return ", ".join(first) + " and " + last if first else last


def described(picture: Picture) -> str:
    """Returns "A red circle, a blue square and a black 7." """
    return sentence(listed([a(name(thing)) for thing in picture.things]))


def lies(one: Thing, side: str, other: Thing) -> bool | None:
    """Returns whether a thing is on this side of another; None if it is hard to say."""
    axis, sign = SIDES[side]
    across, along = (getattr(one, each) - getattr(other, each) for each in (axis, "xy".replace(axis, "")))
    if abs(across) < CLEAR or abs(along) > abs(across):
        return None if abs(across) > CLEAR / 2 else False
    return across * sign > 0


def place_of(thing: Thing) -> str:
    """Returns "at the top left", and "" near the border of two places."""
    words = []
    for value, low, high in ((thing.y, "top", "bottom"), (thing.x, "left", "right")):
        if min(abs(value - 0.38), abs(value - 0.62)) < 0.05:
            return ""
        words.append(low if value < 0.38 else high if value > 0.62 else "")
    if not any(words):
        return "in the middle"
    if words[0]:
        return f"at the {' '.join(filter(None, words))}"
    return f"on the {words[1]}"


def describe(picture: Picture, rng: Random) -> Turn:
    return Turn("what is in the picture", rng.choice(DESCRIBE), described(picture))


def digit(picture: Picture, rng: Random) -> Turn:
    found = picture.digit
    return Turn("digit", rng.choice(DIGIT), f"{found.kind}." if found else "There is no digit.")


def colour(picture: Picture, rng: Random) -> Turn | None:
    """Asks for the colour of a thing that is there once, seldom for one that is not."""
    nouns = [noun(thing) for thing in picture.things]
    if len(nouns) == 1 and rng.random() < 0.3:
        return Turn("colour", rng.choice(ONLY_COLOUR), sentence(picture.things[0].colour))
    if rng.random() < 0.12:
        first = list(dict.fromkeys(thing.colour for thing in picture.things))
        return Turn("colour", rng.choice(COLOURS_ASKED), sentence(listed(first)))
    if rng.random() < 0.12:
        missing = rng.choice([each for each in (*SHAPES, "digit") if each not in nouns])
        return Turn("colour", rng.choice(COLOUR).format(missing), f"There is no {missing}.")
    once = [thing for thing in picture.things if nouns.count(noun(thing)) == 1]
    if not once:
        return None
    thing = rng.choice(once)
    word = rng.choice(("digit", "digit", "number", thing.kind)) if thing.is_digit else thing.kind
    return Turn("colour", rng.choice(COLOUR).format(word), sentence(thing.colour))


def shape(picture: Picture, rng: Random) -> Turn | None:
    """Asks for the only shape, or for the one of a colour."""
    if not picture.shapes:
        return Turn("shape", rng.choice(ONLY_SHAPE), "There is no shape.") if rng.random() < 0.3 else None
    if len(picture.shapes) == 1 and rng.random() < 0.5:
        return Turn("shape", rng.choice(ONLY_SHAPE), sentence(a(picture.shapes[0].kind)))
    if rng.random() < 0.3:
        kinds = [thing.kind for thing in picture.shapes]
        text = f"two {plural(kinds[0])}" if len({*kinds}) < len(kinds) else listed([a(kind) for kind in kinds])
        return Turn("shape", rng.choice(SHAPES_ASKED), sentence(text))
    colours = [thing.colour for thing in picture.things]
    if rng.random() < 0.12:
        missing = rng.choice([each for each in COLOURS if each not in (*colours, picture.background)])
        return Turn("shape", rng.choice(BY_COLOUR).format(missing), "Nothing.")
    once = [thing for thing in picture.shapes if colours.count(thing.colour) == 1]
    once = [thing for thing in once if thing.colour != picture.background]
    if not once:
        return None
    thing = rng.choice(once)
    return Turn("shape", rng.choice(BY_COLOUR).format(thing.colour), sentence("the " + thing.kind))


def count(picture: Picture, rng: Random) -> Turn:
    if rng.random() < 0.6:
        return Turn("how many", rng.choice(HOW_MANY), f"{NUMBERS[len(picture.shapes)]}.".replace("No.", "None."))
    kind = rng.choice([thing.kind for thing in picture.shapes] or SHAPES) if rng.random() < 0.75 else rng.choice(SHAPES)
    number = sum(thing.kind == kind for thing in picture.shapes)
    question = rng.choice(("How many {} are there?", "How many {} do you see?", "Count the {}.")).format(plural(kind))
    return Turn("how many", question, f"{NUMBERS[number]}.".replace("No.", "None."))


def is_there(picture: Picture, rng: Random) -> Turn:
    """Asks for a thing by shape, or by colour and shape; half of the answers are no."""
    thing = rng.choice(picture.things)
    form = rng.choice(IS_THERE)
    kind, tint = noun(thing), thing.colour
    if rng.random() < 0.5:  # something else, alike in one of the two
        kind = rng.choice((*SHAPES, "digit")) if rng.random() < 0.6 else kind
        tint = rng.choice(tuple(COLOURS)) if rng.random() < 0.6 else tint
    if thing.is_digit and rng.random() < 0.3:
        kind, tint = rng.choice((thing.kind, str(rng.randrange(10)))), ""
    if rng.random() < 0.4:
        tint = ""
    there = any(kind in (noun(each), each.kind) and tint in ("", each.colour) for each in picture.things)
    asked = kind if kind.isdigit() else a(f"{tint} {kind}".strip())
    return Turn("yes or no", form.format("a " + asked if kind.isdigit() else asked), "Yes." if there else "No.")


def is_colour(picture: Picture, rng: Random) -> Turn | None:
    thing = rng.choice(picture.things)
    if [noun(each) for each in picture.things].count(noun(thing)) > 1:
        return None
    tint = thing.colour if rng.random() < 0.5 else rng.choice(tuple(COLOURS))
    answer = "Yes." if tint == thing.colour else "No."
    return Turn("yes or no", rng.choice(IS_COLOUR).format(noun(thing), tint), answer)


def _pair(picture: Picture, rng: Random) -> tuple[Thing, Thing] | None:
    """Returns two things of different nouns."""
    pairs = [(one, other) for one in picture.things for other in picture.things if noun(one) != noun(other)]
    return rng.choice(pairs) if pairs else None


def beside(picture: Picture, rng: Random) -> Turn | None:
    """Asks what is on a side of a thing, or whether one is on that side of another."""
    pair = _pair(picture, rng)
    if pair is None or [noun(each) for each in picture.things].count(noun(pair[1])) > 1:
        return None
    one, other = pair
    side = rng.choice(tuple(SIDES))
    words = rng.choice(BESIDE[side])
    if rng.random() < 0.5:
        there = lies(one, side, other)
        if there is None or [noun(each) for each in picture.things].count(noun(one)) > 1:
            return None
        return Turn("place", rng.choice(IS_BESIDE).format(noun(one), words, noun(other)), "Yes." if there else "No.")
    others = [each for each in picture.things if each is not other]
    sides = [lies(each, side, other) for each in others]
    if None in sides or sum(map(bool, sides)) > 1:
        return None
    found = next((each for each, there in zip(others, sides, strict=True) if there), None)
    question = rng.choice(WHAT_IS[:1] if found is not None and found.is_digit else WHAT_IS).format(words, noun(other))
    return Turn("place", question, sentence("the " + name(found)) if found else "Nothing.")


def at_side(picture: Picture, rng: Random) -> Turn | None:
    """Asks which of two things is on a side, or beside the other."""
    if len(picture.things) != 2:
        return None
    one, other = rng.sample(picture.things, 2)
    if rng.random() < 0.15 and noun(one) != noun(other):
        return Turn("place", rng.choice(NEXT_TO).format(noun(one)), sentence("the " + name(other)))
    sides = [side for side in SIDES if lies(one, side, other)]
    if not sides:
        return None
    side = rng.choice([sides[0], next(each for each in SIDES if lies(other, each, one))])
    found = one if lies(one, side, other) else other
    question = rng.choice(WHICH_SIDE[:1] if found.is_digit else WHICH_SIDE).format(rng.choice(AT_SIDE[side]))
    return Turn("place", question, sentence("the " + name(found)))


def where(picture: Picture, rng: Random) -> Turn | None:
    thing = rng.choice(picture.things)
    spot = place_of(thing)
    if not spot or [noun(each) for each in picture.things].count(noun(thing)) > 1:
        return None
    return Turn("place", rng.choice(WHERE).format(noun(thing)), sentence(spot))


def background(picture: Picture, rng: Random) -> Turn | None:
    if not picture.background:
        return None
    return Turn("background", rng.choice(BACKGROUND), sentence(picture.background))


def other(picture: Picture, rng: Random) -> Turn:
    """Asks what the model does not know."""
    question = rng.choice(OTHER)
    if rng.random() < 0.3:
        words = " ".join(rng.choices(OTHER, k=2)).split()
        rng.shuffle(words)
        question = " ".join(words[: rng.randint(2, 8)])
    return Turn("other questions", question, UNKNOWN)


Ask = Callable[[Picture, Random], Turn | None]
ASKED: dict[Ask, float] = {
    describe: 3, digit: 2, colour: 3, shape: 2.5, count: 1, is_there: 2, is_colour: 1, beside: 2, at_side: 1.2,
    where: 1.2, background: 0.8, other: 0.6,
}  # fmt: skip


def spelled(question: str, rng: Random) -> str:
    """Returns a question as people type it: in lower case, or without its last sign."""
    if rng.random() < 0.25:
        question = question.lower()
    return question.rstrip("?.!") if rng.random() < 0.2 else question


def turn(picture: Picture, rng: Random, asked: Sequence[Ask] = tuple(ASKED)) -> Turn:
    """Returns a question of one of these kinds."""
    while True:
        ask = rng.choices(asked, [ASKED[each] for each in asked])[0]
        if ask is digit and picture.digit is None and rng.random() < 0.7:
            continue
        if (found := ask(picture, rng)) is not None:
            return Turn(found.kind, spelled(found.question, rng), found.answer)


def message(text: str, pictures: int = 0) -> dict[str, object]:
    return {"role": "user", "content": [{"type": "image"}] * pictures + [{"type": "text", "text": text}]}


def talk(pictures: Sequence[Picture], rng: Random, turns: int) -> list[dict[str, object]]:
    """Returns the messages of a conversation about pictures, each of which comes later than the one before."""
    messages: list[dict[str, object]] = []
    if rng.random() < 0.1:
        messages.append({"role": "system", "content": rng.choice(SYSTEMS)})
    if not pictures:
        for _ in range(turns):
            question = spelled(rng.choice((*DESCRIBE[:-1], *DIGIT, *OTHER, *HOW_MANY)), rng)
            messages += [message(question), {"role": "assistant", "content": NO_PICTURE}]
        return messages
    for picture in pictures:
        for number in range(turns // len(pictures)):
            new = turn(picture, rng)
            messages += [
                message(new.question, pictures=number == 0), {"role": "assistant", "content": new.answer}
            ]  # fmt: skip
    return messages
