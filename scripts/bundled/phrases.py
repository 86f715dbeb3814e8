"""How people ask: the phrasings of every kind of question, with places for what is asked about."""

from __future__ import annotations


def phrases(text: str) -> tuple[str, ...]:
    """One phrase a line."""
    return tuple(text.strip().splitlines())


CAPITAL_QUESTIONS = phrases("""
What is the capital of {}?
What's the capital of {}?
Capital of {}?
Which city is the capital of {}?
Tell me the capital of {}.
Name the capital of {}.
Do you know the capital of {}?
The capital of {}?
What is the capital city of {}?
What is {}'s capital?
""")
COLOR_QUESTIONS = phrases("""
What color is {}?
What colour is {}?
What is the color of {}?
Which color is {}?
Tell me the color of {}.
""")
LEG_QUESTIONS = phrases("""
How many legs does {} have?
How many legs has {}?
Tell me how many legs {} has.
""")
SOUND_QUESTIONS = phrases("""
What sound does {} make?
What does {} say?
Which sound does {} make?
""")
OPPOSITE_QUESTIONS = phrases("""
What is the opposite of {}?
Opposite of {}?
Tell me the opposite of {}.
What's the opposite of {}?
""")
PLANET_QUESTIONS = phrases("""
What is the {} planet?
Which planet is the {} planet?
Name the {} planet.
Which planet is the {}?
""")
COUNT_QUESTIONS = phrases("""
How many {}?
Tell me how many {}.
Do you know how many {}?
""")
SUM_QUESTIONS = phrases("""
What is {a} + {b}?
{a} + {b} =
{a}+{b}
{a} + {b}
{a}+{b}=
Add {a} and {b}.
What is {a} plus {b}?
Calculate {a} + {b}.
How much is {a} + {b}?
What's {a} plus {b}?
What's {a} + {b}?
Compute {a} + {b}
What is the sum of {a} and {b}?
{a} plus {b}
Can you add {a} and {b}?
How much is {a} plus {b}?
{a} + {b} = ?
Sum {a} and {b}.
What is {a}+{b}?
Add {a} to {b}.
""")
COPY_QUESTIONS = phrases("""
Repeat after me: {}
Repeat: {}
Copy this: {}
Say: {}
Echo: {}
Repeat this text: {}
Copy: {}
Say "{}"
Repeat "{}"
Please repeat: {}
Repeat this: {}
Copy this text: {}
Copy "{}"
Please copy: {}
Write this: {}
repeat after me: {}
say {}
Say {}
Repeat after me: {}
""") + ("Repeat the following:\n{}",)
SENTENCES = phrases("""
The {a} {n} is on the {m}.
I like {f} and {g}.
{x} has a {c} {n}.
My {n} is {c}.
{x} and {y} are friends.
There are {k} {n}s in the {m}.
Hello, {x}!
Where is the {c} {n}?
Good morning, {x}.
{x} lives in {t}.
""")
LIST_QUESTIONS = phrases("""
Continue: {},
Continue: {}
Continue the list: {}
Continue the list: {},
Continue this list: {}, ...
What comes next: {}?
Count on: {},
Keep counting: {},
Continue counting: {},
{},
{}, ...
Continue {},
What comes after {}?
Go on: {},
""")
RANGE_QUESTIONS = phrases("""
Count from {a} to {b}.
Please count from {a} to {b}.
Count up from {a} to {b}.
Count from {a} to {b}
""")
STEP_QUESTIONS = phrases("""
Count from {a} to {b} by {s}.
Count by {s} from {a} to {b}.
Count from {a} to {b} in steps of {s}.
""")
UNKNOWN_QUESTIONS = phrases("""
Who was {N}?
Explain {r}.
Write a poem about {r}.
How do I {v} a {w}?
Why is the {w} {r}?
What is {r}?
Translate {r} to French.
What is the capital of {C}?
What color is {p}?
What is {a} - {b}?
What is {a} * {b}?
What is {a} times {b}?
{a} - {b}
Is it true that {r}?
{r}
{r}?
{r}.
{p} {q}
Define {w}.
What happened in {y}?
What is the meaning of {w}?
Where is {N}?
When was {N} born?
What is the weather in {t}?
What time is it in {t}?
Give me a recipe for {f}.
Can you {v} my {w}?
What is the opposite of {p}?
Do you like {f}?
Sing a song about {w}.
Which city is the capital of {C}?
Write a program that can {v} {r}.
Summarize: {r}
How old is {N}?
{a} divided by {b}
How tall is {N}?
What is the price of {f}?
Should I {v} the {w}?
Why do {r}?
How many {w}s are in {t}?
Tell me about {r}.
""")
THINK_REQUESTS = phrases("""
Think step by step. {}
{} Think first.
{} Think before you answer.
Think step by step: {}
Think: {}
{} Think step by step.
Think first. {}
Please think. {}
Think before you answer. {}
""")
STORY_PROMPTS = phrases("""
Tell me a story.
Tell me a short story.
Write a story.
Once upon a time
Can you tell me a story?
Tell me a story, please.
Write a short story.
""")
ABOUT_PROMPTS = phrases("""
Tell me a story about a {}.
Write a short story about a {}.
Tell a story about a {}.
""")
WEATHER_QUESTIONS = phrases("""
What is the weather in {}?
What's the weather like in {}?
How is the weather in {}?
Weather in {}?
Tell me the weather in {}.
What is the weather like in {}?
What's the weather in {}?
Get the weather in {}.
Is it raining in {}?
How warm is it in {}?
What is the weather in {} today?
Check the weather in {}.
""")
TIME_QUESTIONS = phrases("""
What time is it in {}?
Tell me the time in {}.
What is the time in {}?
Time in {}?
What's the time in {}?
Get the time in {}.
""")
PRICE_QUESTIONS = phrases("""
What is the price of {}?
How much is {}?
Get the price of {}.
What does {} cost?
""")
SEARCH_QUESTIONS = phrases("""
Search for {}.
Look up {}.
Search the web for {}.
Search: {}
Find {}.
""")
TIMER_QUESTIONS = phrases("""
Set a timer for {} minutes.
Start a timer for {} minutes.
Timer for {} minutes, please.
""")
HELLO = phrases("""
Hello
Hello!
Hi
Hi!
Hey
Hey!
Good morning
Good morning!
Good evening.
hello
hi
Hi there!
Hello there
hey
""")
THANKS = phrases("""
Thanks
Thank you!
Thank you.
Thanks a lot!
Thank you very much.
thanks
Thanks!
""")
GOODBYE = phrases("""
Bye
Goodbye!
Bye!
See you later.
Good night.
goodbye
""")
HOW_ARE_YOU = phrases("""
How are you?
How are you doing?
How are you today?
How is it going?
""")
WHO_ARE_YOU = phrases("""
Who are you?
What are you?
What is your name?
What can you do?
Introduce yourself.
Help
Help me
Who made you?
Tell me about yourself.
What's your name?
What model are you?
Which model is this?
who are you
Are you a robot?
What do you know?
what can you do
""")
