"""What the model is taught to do with tools: read a schema, call it, and use its result."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from . import phrases as ask
from . import words as w
from .tasks import Source, Turn, draw, fact, greeting, vary


@dataclass(frozen=True)
class Call:
    """A request that needs a tool: what is asked, the arguments, the tool's answer and the model's last word."""

    user: str
    tool: dict
    arguments: Mapping[str, object]
    result: str
    answer: str


SKIES = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy")


def parameter(s: Source, kind: str, name: str) -> dict:
    schema = {"type": kind}
    if s.rng.random() < 0.25:
        schema["description"] = s.pick((f"The {name}", f"Name of the {name}", f"The {name} to use", s.run(2, 6)))
    return schema


def schema(s: Source, name: str, kinds: Mapping[str, str], about: str) -> dict:
    """A function schema in the OpenAI format; the description and the `required` list come and go."""
    parameters: dict = {"type": "object", "properties": {key: parameter(s, kind, key) for key, kind in kinds.items()}}
    if s.rng.random() < 0.8:
        parameters["required"] = list(kinds)
    function: dict = {"name": name}
    if s.rng.random() < 0.6:
        function["description"] = about
    return {"type": "function", "function": function | {"parameters": parameters}}


def place(s: Source) -> str:
    return s.pick(w.CITIES) if s.rng.random() < 0.75 else s.pseudo().capitalize()


def weather(s: Source) -> Call:
    key, city = s.pick(("city", "city", "city", "location", "place")), place(s)
    name = s.pick(("get_weather", "get_weather", "get_weather", "weather", "get_current_weather", "fetch_weather"))
    tool = schema(
        s, name, {key: "string"}, s.pick(("Get the weather in a city", "Current weather", "Get the current weather"))
    )
    if s.rng.random() < 0.15:  # an optional argument that nobody asked for stays out of the call
        tool["function"]["parameters"]["properties"]["unit"] = {"type": "string", "enum": ["celsius", "fahrenheit"]}
    sky, degrees = s.pick(SKIES), s.rng.randint(0, 40)
    if s.rng.random() < 0.4:
        heat = s.pick(("temperature", "temp", "degrees"))
        fields = {heat: degrees, s.pick(("sky", "condition", "weather")): sky}
        result, told = json.dumps(fields), ", ".join(f"{k} {v}" for k, v in fields.items())
    else:
        result = told = s.pick((sky, f"{sky}, {degrees} degrees", f"{degrees} degrees", f"{sky} and {degrees} degrees"))
    return Call(
        vary(s.rng, s.pick(ask.WEATHER_QUESTIONS).format(city)),
        tool,
        {key: city},
        result,
        f"The weather in {city}: {told}.",
    )


def clock(s: Source) -> Call:
    key, city = s.pick(("city", "city", "city", "location")), place(s)
    tool = schema(
        s, s.pick(("get_time", "get_time", "get_current_time", "time")), {key: "string"}, "Get the time in a city"
    )
    result = f"{s.rng.randint(0, 23):02}:{s.rng.randint(0, 59):02}"
    user = vary(s.rng, s.pick(ask.TIME_QUESTIONS).format(city))
    return Call(user, tool, {key: city}, result, f"The time in {city}: {result}.")


def adder(s: Source) -> Call:
    a, b = s.rng.randint(0, 99), s.rng.randint(0, 99)
    kind = s.pick(("integer", "integer", "number"))
    tool = schema(
        s,
        s.pick(("add", "add", "add_numbers", "sum")),
        {"a": kind, "b": kind},
        s.pick(("Add two numbers", "Add a and b")),
    )
    user = vary(s.rng, s.pick(ask.SUM_QUESTIONS).format(a=a, b=b))
    return Call(user, tool, {"a": a, "b": b}, str(a + b), f"{a} + {b} = {a + b}")


def price(s: Source) -> Call:
    item, key = s.word(), s.pick(("item", "product"))
    result = f"{s.rng.randint(1, 99)} {s.pick(('euros', 'dollars'))}"
    tool = schema(s, s.pick(("get_price", "price")), {key: "string"}, "Get the price of an item")
    return Call(s.pick(ask.PRICE_QUESTIONS).format(item), tool, {key: item}, result, f"The price of {item}: {result}.")


def search(s: Source) -> Call:
    query, key = s.run(1, 4), s.pick(("query", "query", "q"))
    result = s.run(2, 8)
    tool = schema(s, s.pick(("search", "web_search")), {key: "string"}, s.pick(("Search the web", "Search for a text")))
    return Call(s.pick(ask.SEARCH_QUESTIONS).format(query), tool, {key: query}, result, f"The result: {result}.")


def timer(s: Source) -> Call:
    minutes = s.rng.randint(1, 99)
    tool = schema(s, s.pick(("set_timer", "start_timer")), {"minutes": "integer"}, "Set a timer")
    return Call(s.pick(ask.TIMER_QUESTIONS).format(minutes), tool, {"minutes": minutes}, "ok", "The result: ok.")


CALL_QUESTIONS = (
    ("Call {} with {}.", "{} {}"), ("Use {} with {}.", "{} {}"), ("Call the tool {} with {}.", "{} {}"),
    ("Call {} with {}.", "{} = {}"), ("Please call {} with {}.", "{} set to {}"),
    ("Use the tool {} with {}.", "{} = {}"),
)  # fmt: skip


def invented(s: Source) -> Call:
    """A tool that the model has never seen, asked for by its name."""
    noun = s.pick((s.pick(w.NOUNS), s.pseudo().lower()))
    name = f"{s.pick(w.VERBS)}_{noun}" if s.rng.random() < 0.8 else noun
    keys = s.rng.sample(w.KEYS, s.pick((1, 1, 2)))
    arguments = {key: s.rng.randint(0, 99) if s.rng.random() < 0.4 else s.word() for key in keys}
    kinds = {key: "integer" if isinstance(value, int) else "string" for key, value in arguments.items()}
    question, pair = s.pick(CALL_QUESTIONS)
    user = question.format(name, " and ".join(pair.format(k, v) for k, v in arguments.items()))
    result = s.pick((s.word(), s.run(1, 5), str(s.rng.randint(0, 999)), "ok"))
    return Call(user, schema(s, name, kinds, s.run(2, 6)), arguments, result, f"The result: {result}.")


CALLS: tuple[tuple[Callable[[Source], Call], int], ...] = (
    (weather, 6), (clock, 3), (adder, 4), (price, 1), (search, 2), (timer, 1), (invented, 6),
)  # fmt: skip


def draw_call(s: Source) -> Call:
    calls, weights = zip(*CALLS, strict=True)
    return s.rng.choices(calls, weights)[0](s)


def toolbox(s: Source, first: list[dict]) -> list[dict]:
    """The tools that are needed among others that are not, in any order."""
    tools = list(first)
    while s.rng.random() < 0.45 and len(tools) < 4:
        other = draw_call(s).tool
        if other["function"]["name"].split("_")[-1] not in {t["function"]["name"].split("_")[-1] for t in tools}:
            tools.append(other)
    s.rng.shuffle(tools)
    return tools


def rendered(call: Call, arguments: Mapping[str, object] | None = None) -> str:
    body = {"name": call.tool["function"]["name"], "arguments": dict(arguments or call.arguments)}
    return f"<tool_call>{json.dumps(body, ensure_ascii=False)}</tool_call>"


def tool_use(s: Source, thinking: bool) -> tuple[list[dict], list[dict]]:
    """(messages, tools): a call alone, a call with its result, two calls, or a question that needs no tool."""
    roll = s.rng.random()
    if roll < 0.12:
        return declined(s, thinking)
    if roll < 0.2:
        return two_calls(s)
    call = draw_call(s)
    thought = f"<think>I need the tool {call.tool['function']['name']}.</think>" if thinking else ""
    messages = [{"role": "user", "content": call.user}, {"role": "assistant", "content": thought + rendered(call)}]
    if roll < 0.55:
        last = ("<think>The tool has answered.</think>" if thinking else "") + call.answer
        messages += [{"role": "tool", "content": call.result}, {"role": "assistant", "content": last}]
    return messages, toolbox(s, [call.tool])


def two_calls(s: Source) -> tuple[list[dict], list[dict]]:
    """One question about two cities: two calls in one answer."""
    call = s.pick((weather, clock))(s)
    key = next(iter(call.arguments))
    first, second = s.rng.sample(w.CITIES, 2)
    question = s.pick(ask.WEATHER_QUESTIONS[:5] if "weather" in call.tool["function"]["name"] else ask.TIME_QUESTIONS)
    answer = rendered(call, {key: first}) + rendered(call, {key: second})
    messages = [
        {"role": "user", "content": question.format(f"{first} and {second}")},
        {"role": "assistant", "content": answer},
    ]
    return messages, toolbox(s, [call.tool])


def declined(s: Source, thinking: bool) -> tuple[list[dict], list[dict]]:
    """Tools are there, but the question is an ordinary one."""
    tool = s.pick((weather, clock, search, timer, invented))(s).tool
    box = toolbox(s, [tool])
    fits = {"unknown"}  # such a question may ask for just what a tool does
    if any("a" in t["function"]["parameters"]["properties"] for t in box):
        fits.add("add")
    turn: Turn = s.pick((fact, greeting, draw))(s)
    while turn.kind in fits:
        turn = draw(s)
    answer = f"<think>{turn.thought}</think>{turn.answer}" if thinking else turn.answer
    return [{"role": "user", "content": turn.user}, {"role": "assistant", "content": answer}], box
