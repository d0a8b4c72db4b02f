"""Questions with checkable answers, for training and testing the demo model.

Pure Python without state, seeded by the caller's `random.Random`. A task makes a question from random numbers, and solves any of
its questions from the question's text. An answer can therefore be checked without knowing how the question was made.
"""

import json
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tool_words import ATTRIBUTES, KINDS

WORDS = tuple(
    """
    able acorn amber anchor angle apple arrow autumn badge baker balance bamboo banana barn basket beach
    bean bear bell berry bird blanket blue boat bottle branch brave bread breeze bridge bright brook brother
    brown bucket butter cabin cake camel candle canyon carpet castle cat cedar chair chalk cheese cherry
    circle city clay clever cliff clock cloud clover coast coffee cold copper coral corn cotton cousin cow
    crane creek cricket crown cup curtain daisy dance dark dawn deer desert dinner dog dolphin door dragon
    dream drum duck dusk eagle early earth east echo elbow engine evening fable falcon family farm father
    feather fence fern field finch finger fire fish flag flame flower flute forest fox frame friend frog
    frost fruit galaxy garden garlic gate gentle giant ginger glass globe goat gold grain grape grass gravel
    green guitar hammer happy harbor harvest hat hazel heart hedge hello hill honey horse house ice island
    ivory ivy jacket jar jelly jewel journey juice jungle kettle key king kitchen kite kitten ladder lake
    lamp lantern large leaf lemon letter library light lily lime lion little lizard lunch maple marble market
    meadow melon metal midnight milk mill mint mirror moon morning mother mountain mouse music nest night
    north notebook nut oak ocean olive onion orange orchard otter oven owl paint palace panda paper parrot
    path peach pear pearl pebble pencil penguin pepper piano picture pigeon pillow pine pink planet plant
    plate plum pocket pond poppy potato pottery puzzle queen quick quiet quilt rabbit rain raven red reed
    ribbon rice ring river road robin rocket roof root rose round sail salt sand school sea seed shadow sheep
    shell ship shore silent silver sister sky slow small smoke snow soap soft song south sparrow spice spider
    spoon spring square squirrel stable star stem stock stone storm story stream street strong sugar summer
    sun swan table tall tea teacher thread thunder tiger timber tomato tower town train tree tulip turtle
    valley velvet village violet violin wagon walnut warm water wave weather west whale wheat wheel white
    willow wind window winter wolf wood wool yellow young zebra
    """.split()  # noqa: SIM905
)

# The model can copy only words that it has seen, so the words of tools are included here.
ALL_WORDS = (*WORDS, *(word for word in dict.fromkeys((*ATTRIBUTES, *KINDS)) if word not in WORDS))

NAMES = tuple(
    """
    Ada Alan Alice Amir Anna Barbara Boris Carla Chen Clara Daniel Diego Edith Elena Emma Felix Grace Hana
    Hugo Igor Ines Ivan Jack Jane Kenji Lara Leo Lin Lucas Maria Marie Max Maya Mila Nadia Nina Noah Olga
    Omar Oscar Paul Peter Priya Rosa Ruth Sam Sara Sofia Tom Vera Victor Wei Yuki Zoe
    """.split()  # noqa: SIM905
)

CITIES = tuple(
    """
    Athens Berlin Boston Cairo Delhi Dublin Geneva Hanoi Kyoto Lagos Lima Lisbon London Madrid Milan Nairobi
    Osaka Oslo Paris Prague Quito Rome Seoul Sofia Tokyo Vienna Warsaw Zurich
    """.split()  # noqa: SIM905
)

COLORS = ("amber", "black", "blue", "brown", "gold", "green", "orange", "pink", "red", "silver", "white", "yellow")

# Copying is trained on every code point of these ranges; most are not a single token.
SCRIPTS = {
    "accents": tuple("àáâãäåæçèéêëìíîïñòóôõöøùúûüýÿœšžčřůğışłńśźżßÀÉÖÜÇÑÅØ"),
    "greek": tuple("αβγδεζηθικλμνξοπρσςτυφχψωάέήίόύώΑΒΓΔΘΛΞΠΣΦΨΩ"),
    "cyrillic": tuple(chr(point) for point in range(0x0410, 0x0450)),
    "kana": tuple(chr(point) for point in range(0x3042, 0x3093)) + tuple(chr(p) for p in range(0x30A2, 0x30F3)),
    "hangul": tuple(chr(point) for point in range(0xAC00, 0xD7A4, 7)),
    "cjk": tuple(chr(point) for point in range(0x4E00, 0x9FA5, 3)),
    "emoji": tuple(chr(point) for point in range(0x1F300, 0x1F650)) + tuple(chr(p) for p in range(0x1F680, 0x1F6C6)),
}

PHRASES = (
    "café au lait",
    "naïve façade",
    "über den Wolken",
    "El niño comió piñatas",
    "Ça va très bien",
    "smörgåsbord",
    "Привет, мир",
    "доброе утро",
    "Γειά σου Κόσμε",
    "καλημέρα",
    "你好，世界",
    "谢谢你",
    "こんにちは世界",
    "ありがとう",
    "안녕하세요",
    "🌱 roots",
    "🚀🚀🚀",
    "🙂 ok 👍",
    "日本語 and English",
    "Zażółć gęślą jaźń",
    "ñandú 🦤",
    "五 + 六",
)

IDENTITY = "I am the Rootstock demo model. I can add, count, copy, spell and write small JSON."
UNKNOWN = "I do not know that. I can add, count, copy, spell and write small JSON."
GREETINGS = {
    **dict.fromkeys(("Hello", "Hello!", "Hello.", "hello", "Hi", "Hi!", "hi", "Hey", "Hey!"), "Hello! How can I help?"),
    **dict.fromkeys(("Hello there", "Hello there!", "Good morning", "Good evening"), "Hello! How can I help?"),
    **dict.fromkeys(("How are you?", "How are you today?"), "I am well, thank you. How can I help?"),
    **dict.fromkeys(("Thanks", "Thanks!", "Thank you", "Thank you!", "Thank you."), "You are welcome."),
    **dict.fromkeys(("Bye", "Bye!", "Goodbye", "Goodbye!"), "Goodbye!"),
    **dict.fromkeys(("Who are you?", "who are you?", "What are you?", "What is your name?"), IDENTITY),
    **dict.fromkeys(("What can you do?", "Help", "Introduce yourself.", "Tell me about yourself."), IDENTITY),
}
OTHER_QUESTIONS = (
    "What is a {}?",
    "What is the {}?",
    "Where is the {}?",
    "Tell me about the {}.",
    "Why is the {} {}?",
    "How do I find a {}?",
    "Who made the {}?",
    "Write a poem about the {}.",
    "Tell me a story about a {} and a {}.",
    "Is the {} a {}?",
    "When does the {} start?",
)
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are the Rootstock demo model.",
    "You are a helpful assistant. Answer briefly.",
    "Answer the question.",
    "Be brief.",
)
HELD_OUT_ONE_IN = 32


@dataclass(frozen=True)
class Task:
    """A kind of question."""

    ask: Callable[[Random], str]  # makes a question
    solve: Callable[[str], str]  # returns the answer to a question
    share: float  # weight in the training data
    generalises: bool = True  # whether a fixed part of the answers is held out; if not, the task is a small closed set

    def __call__(self, rng: Random) -> tuple[str, str]:
        question = self.ask(rng)
        return question, self.solve(question)


def sample(task: str, rng: Random) -> tuple[str, str]:
    """Returns a question and answer of the named task. Raises KeyError if there is no such task."""
    return TASKS[task](rng)


def is_correct(task: str, question: str, answer_text: str) -> bool:
    """Whether the text answers the question exactly, without surrounding white space. JSON is compared by value."""
    expected, given = TASKS[task].solve(question), answer_text.strip()
    if task != "json":
        return given == expected
    try:
        return bool(json.loads(given) == json.loads(expected))
    except ValueError:
        return False


def is_held_out(task: str, answer: str) -> bool:
    """Whether training never shows this answer. A list of equations is held out if one of its equations is.

    The decision depends on the answer and not on the question. Training therefore does not show a held-out answer with another
    wording of the question. Words of ALL_WORDS are never held out: each is a single token, whose letters can only be memorized.
    """
    letters = answer.replace("-", "")
    if not TASKS[task].generalises or letters in ALL_WORDS or letters[::-1] in ALL_WORDS:
        return False
    return any(zlib.crc32(part.encode()) % HELD_OUT_ONE_IN == 0 for part in answer.removesuffix(".").split("; "))


def sample_training(task: str, rng: Random) -> tuple[str, str]:
    while True:
        question, answer = sample(task, rng)
        if not is_held_out(task, answer):
            return question, answer


def sample_held_out(task: str, rng: Random) -> tuple[str, str]:
    """Returns a question and answer that training never shows. Returns any question if the task does not generalise."""
    while True:
        question, answer = sample(task, rng)
        if is_held_out(task, answer) or not TASKS[task].generalises:
            return question, answer


def conversation(
    rng: Random, turns: int, draw: Callable[[str, Random], tuple[str, str]] = sample_training
) -> list[dict[str, str]]:
    """Returns the chat messages (`role`, `content`) of `turns` questions with answers.

    Some conversations have a system message, or a name that is given in one turn and asked for in a later one.
    """
    names, shares = list(TASKS), [task.share for task in TASKS.values()]
    pairs = [draw(name, rng) for name in rng.choices(names, shares, k=turns)]
    if turns > 1 and rng.random() < 0.3:
        told, asked = sorted(rng.sample(range(turns), 2))
        name = any_name(rng)
        pairs[told] = (f"My name is {name}.", f"Nice to meet you, {name}.")
        pairs[asked] = ("What is my name?", f"Your name is {name}.")
    messages = [system_message(rng)] if rng.random() < 0.2 else []
    for question, answer in pairs:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages


def system_message(rng: Random) -> dict[str, str]:
    if rng.random() < 0.5:
        return {"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}
    sentences = [sentence(rng, rng.randint(3, 10)) for _ in range(rng.choice((1, 1, 2, 4, 8)))]
    return {"role": "system", "content": " ".join(sentences)}


# Building blocks of questions.


def sentence(rng: Random, words: int) -> str:
    return " ".join(any_word(rng) for _ in range(words)).capitalize() + "."


def any_word(rng: Random) -> str:
    return rng.choice(ALL_WORDS) if rng.random() < 0.7 else pseudo_word(rng)


def any_name(rng: Random) -> str:
    return rng.choice(NAMES) if rng.random() < 0.6 else pseudo_word(rng).capitalize()


def pseudo_word(rng: Random) -> str:
    syllables = rng.choice((1, 2, 2, 2, 3))
    word = "".join(rng.choice("bcdfghjklmnprstvwyz") + rng.choice("aeiou") for _ in range(syllables))
    return word + rng.choice(("", "l", "m", "n", "r", "s", "t", "x", "q", "ck", "nd"))


def operands(rng: Random, operator: str) -> tuple[int, int]:
    if operator == "*":
        return rng.randint(0, 12), rng.randint(0, 12)
    high = 99 if rng.random() < 0.85 else 20
    first, second = rng.randint(0, high), rng.randint(0, high)
    return (max(first, second), min(first, second)) if operator == "-" else (first, second)


def asks_arithmetic(operator: str, spoken: str) -> Callable[[Random], str]:
    symbols = (operator, operator, spoken)
    forms = ("What is {}?", "What is {}?", "Compute {}.", "{} = ?", "{}", "What's {}?", "How much is {}?")

    def ask(rng: Random) -> str:
        first, second = operands(rng, operator)
        return rng.choice(forms).format(f"{first} {rng.choice(symbols)} {second}")

    return ask


def ask_sums(rng: Random) -> str:
    exercises = []
    for _ in range(rng.randint(2, 8)):
        operator = rng.choice("++++--*")
        first, second = operands(rng, operator)
        exercises.append(f"{first} {operator} {second}")
    return f"Solve: {'; '.join(exercises)}"


def asks_count(shortest: int, longest: int, down: bool = False) -> Callable[[Random], str]:
    def ask(rng: Random) -> str:
        low = rng.choice((0, 1, 1, rng.randint(0, 20), rng.randint(0, 130)))
        high = low + rng.randint(shortest, longest)
        return f"Count down from {high} to {low}." if down else f"Count from {low} to {high}."

    return ask


def ask_copy(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.45:
        text = sentence(rng, rng.randint(1, 12))
    elif kind < 0.7:
        text = " ".join(any_word(rng) for _ in range(rng.randint(1, 8)))
    elif kind < 0.85:
        text = " ".join(str(rng.randint(0, 10 ** rng.randint(1, 6))) for _ in range(rng.randint(1, 5)))
    else:
        text = "".join(chr(rng.randint(33, 126)) for _ in range(rng.randint(1, 20)))
    return copy_request(rng, text)


def ask_copy_unicode(rng: Random) -> str:
    if rng.random() < 0.15:
        return copy_request(rng, rng.choice(PHRASES))
    parts = [unicode_part(rng) for _ in range(rng.randint(1, 4))]
    return copy_request(rng, rng.choice((" ", " ", "", ", ")).join(parts))


def unicode_part(rng: Random) -> str:
    if rng.random() < 0.2:
        return any_word(rng)
    script = rng.choice(list(SCRIPTS))
    longest = 3 if script == "emoji" else 6
    return "".join(rng.choice(SCRIPTS[script]) for _ in range(rng.randint(1, longest)))


def copy_request(rng: Random, text: str) -> str:
    return f"{rng.choice(('Repeat: ', 'Repeat: ', 'Copy: ', 'Say: '))}{text}"


def asks_word(*forms: str, longest: int = 12) -> Callable[[Random], str]:
    def ask(rng: Random) -> str:
        word = any_word(rng)
        while len(word) > longest:
            word = any_word(rng)
        return rng.choice(forms).format(word)

    return ask


def ask_json(rng: Random) -> str:
    fields = {
        "name": any_name(rng),
        "age": str(rng.randint(1, 99)),
        "city": rng.choice(CITIES),
        "color": rng.choice(COLORS),
        "item": any_word(rng),
        "count": str(rng.randint(0, 200)),
    }
    keys = ["name", "age"] if rng.random() < 0.4 else rng.sample(list(fields), rng.randint(1, 4))
    return f"Give the JSON for {', '.join(f'{key} {fields[key]}' for key in keys)}."


def ask_other(rng: Random) -> str:
    return rng.choice(OTHER_QUESTIONS).format(rng.choice(WORDS), rng.choice(WORDS))


# Solving a question from its text.


def evaluate_expression(text: str) -> str:
    """Solves the first expression in the text: "17 plus 25" gives "17 + 25 = 42"."""
    match = re.search(r"(\d+) (\+|-|\*|plus|minus|times) (\d+)", text)
    assert match, text
    operator = {"plus": "+", "minus": "-", "times": "*"}.get(match[2], match[2])
    first, second = int(match[1]), int(match[3])
    value = {"+": first + second, "-": first - second, "*": first * second}[operator]
    return f"{first} {operator} {second} = {value}"


def solve_arithmetic(question: str) -> str:
    return evaluate_expression(question) + "."


def solve_sums(question: str) -> str:
    return "; ".join(map(evaluate_expression, question.removeprefix("Solve: ").split("; "))) + "."


def solve_count(question: str) -> str:
    first, last = map(int, re.findall(r"\d+", question))
    step = 1 if first <= last else -1
    return ", ".join(map(str, range(first, last + step, step)))


def solve_copy(question: str) -> str:
    return question.split(": ", 1)[1]


def word_of(question: str) -> str:
    """Returns the last word of the question. If this word is "backwards", returns the word before it."""
    return question.removesuffix(".").removesuffix(" backwards").rsplit(" ", 1)[1]


def solve_spell(question: str) -> str:
    return "-".join(word_of(question))


def solve_reverse(question: str) -> str:
    return "-".join(reversed(word_of(question)))


def solve_json(question: str) -> str:
    fields = dict(field.split(" ", 1) for field in question.removesuffix(".").split(" for ", 1)[1].split(", "))
    values = {key: int(value) if key in ("age", "count") else value for key, value in fields.items()}
    return json.dumps(values, ensure_ascii=False)


TASKS: dict[str, Task] = {
    "add": Task(asks_arithmetic("+", "plus"), solve_arithmetic, share=10),
    "subtract": Task(asks_arithmetic("-", "minus"), solve_arithmetic, share=12),
    "multiply": Task(asks_arithmetic("*", "times"), solve_arithmetic, share=5, generalises=False),
    "sums": Task(ask_sums, solve_sums, share=12),
    "count": Task(asks_count(1, 15), solve_count, share=6),
    "count_down": Task(asks_count(1, 15, down=True), solve_count, share=5),
    "count_long": Task(asks_count(16, 60), solve_count, share=2.5),
    "count_down_long": Task(asks_count(16, 60, down=True), solve_count, share=1.5),
    "copy": Task(ask_copy, solve_copy, share=10),
    "copy_unicode": Task(ask_copy_unicode, solve_copy, share=10),
    "spell": Task(asks_word("Spell the word {}.", "Spell {}."), solve_spell, share=16),
    "reverse": Task(asks_word("Spell {} backwards.", "Reverse the word {}.", longest=8), solve_reverse, share=20),
    "json": Task(ask_json, solve_json, share=8),
    "greeting": Task(lambda rng: rng.choice(list(GREETINGS)), GREETINGS.__getitem__, share=3, generalises=False),
    "other": Task(ask_other, lambda question: UNKNOWN, share=3, generalises=False),
}
