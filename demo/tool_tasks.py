"""Tasks for tools, for training and testing the demo model's tool calls.

Pure Python, seeded by the caller's `random.Random`. A scene has tools and questions. A question has the calls that answer it, in
order, with their results. Some words of names and descriptions are held out by their hash and never shown in training.
"""

import json
import re
import zlib
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tasks import (
    CITIES,
    NAMES,
    UNKNOWN,
    WORDS,
    any_name,
    any_word,
    pseudo_word,
    sample_held_out,
    sample_training,
    sentence,
    system_message,
)
from tasks import TASKS as PLAIN_TASKS
from tool_words import ASKS, ATTRIBUTES, DESCRIPTIONS, KINDS, NAME_FORMS, RESULT_WORDS, UNITS

Message = dict[str, Any]

HELD_OUT_ONE_IN = 6
MOST_TOOLS = 5
ALIKE_SHARE = 0.25

LOOK_UP = "I look up {what}.\nTool: {tool}"


@dataclass(frozen=True)
class Tool:
    """A tool with required parameters."""

    name: str
    description: str
    parameters: tuple[tuple[str, str], ...]  # names and JSON types ("string" or "integer"), in order

    def schema(self) -> Message:
        """Returns the tool in the form of OpenAI's chat API."""
        properties = {name: {"type": kind} for name, kind in self.parameters}
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        return {"type": "function", "function": {"name": self.name, "description": self.description, "parameters": schema}}

    def line(self) -> str:
        """Returns the tool's line in the chat template. The description comes first, so that it leads to the name."""
        names = ", ".join(name if kind == "string" else f"{name}: {kind}" for name, kind in self.parameters)
        return f"{self.description.rstrip('. ')}: {self.name}({names})"


@dataclass(frozen=True)
class Call:
    """A call of a tool, with its result as the text of a tool message."""

    name: str
    arguments: dict[str, str | int]
    result: str

    def text(self) -> str:
        arguments = json.dumps(self.arguments, ensure_ascii=False)
        return f'<tool_call>\n{{"name": {json.dumps(self.name)}, "arguments": {arguments}}}\n</tool_call>'


@dataclass(frozen=True)
class Turn:
    """A message of the assistant: a text that names the values to look up, and then the parallel calls that look them up."""

    text: str
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Question:
    """A question with the calls that answer it."""

    text: str
    turns: tuple[Turn, ...]  # turns with calls, in order
    answer: str  # the final answer


@dataclass(frozen=True)
class Relation:
    """An attribute of one thing, or of two things, and the tool that returns it."""

    attribute: str
    kinds: tuple[str, ...]  # kinds of the things, in the order of the parameters
    tool: Tool

    def looked_up(self, what: str) -> str:
        """Returns the text before a call. The text repeats the tool's line, beginning with the attribute.

        To choose a tool, a small model only has to find the question's word in a line and to continue from there.
        """
        line = self.tool.line()
        found = re.search(rf"\b{re.escape(self.attribute)}\b", line)
        assert found, line
        return LOOK_UP.format(what=what, tool=line[found.start() :])

    def chains(self) -> bool:
        """Whether the tool has only one argument, and this argument may be the result of another tool."""
        return len(self.kinds) == 1 and self.tool.parameters[0][1] == "string"


@dataclass
class Words:
    """Draws the words of one scene's tools. Either all words are held out from training or none is. No word is drawn twice.

    Tools that differ in a single word teach the model to look at that word.
    """

    rng: Random
    held_out: bool
    form: str = ""  # form of all descriptions; empty: drawn for each
    same_kind: str = ""  # kind of thing of all tools; empty: drawn for each
    used: set[str] = field(default_factory=set)

    def attribute(self) -> str:
        return self._draw(ATTRIBUTES, 0.5)

    def kind(self) -> str:
        return self.same_kind or self._draw(KINDS, 0.6)

    def description(self) -> str:
        return self.form or self.rng.choice(DESCRIPTIONS)

    def alike(self) -> None:
        """Gives all later tools the same form and, in half of the scenes, the same kind of thing."""
        self.form = self.rng.choice(DESCRIPTIONS)
        self.same_kind = self.kind() if self.rng.random() < 0.5 else ""

    def identifier(self) -> str:
        return self._draw(("name", "query", "value", "key", "id", "x", "input", "text", "label", "code"), 0.4)

    def _draw(self, common: tuple[str, ...], share: float) -> str:
        """Draws a word. Invented words are more frequent in training than in tests, so that the model learns to find any word."""
        while True:
            kind = 1.0 if not self.held_out and self.rng.random() < 0.4 else self.rng.random()
            word = self.rng.choice(common) if kind < share else self.rng.choice(WORDS) if kind < 0.8 else pseudo_word(self.rng)
            if is_held_out(word) == self.held_out and word not in self.used:
                self.used.add(word)
                return word


def is_held_out(word: str) -> bool:
    return zlib.crc32(b"tool " + word.encode()) % HELD_OUT_ONE_IN == 0


# Tools.


def relation(words: Words) -> Relation:
    rng, attribute, kind = words.rng, words.attribute(), words.kind()
    label = f"{attribute} {words.attribute()}" if rng.random() < 0.08 else attribute
    name = tool_name(rng, label, kind) if rng.random() < 0.85 else f"{words.identifier()}_{words.identifier()}"
    description = words.description().format(a=label, k=kind)
    if rng.random() < 0.1:
        description = f"{description} {sentence(rng, rng.randint(2, 8))}"
    if not words.same_kind and rng.random() < 0.15:
        second = words.kind()
        described = f"Get the {label} for a {kind} and a {second}."
        kinds = (kind, second) if rng.random() < 0.5 else (second, kind)
        parameters = tuple((parameter_name(rng, each), value_type(rng)) for each in kinds)
        return Relation(label, kinds, Tool(name, described, parameters))
    parameter = parameter_name(rng, kind) if rng.random() < 0.7 else words.identifier()
    return Relation(label, (kind,), Tool(name, description, ((parameter, value_type(rng)),)))


def tool_name(rng: Random, attribute: str, kind: str) -> str:
    joined = attribute.replace(" ", "_")
    if rng.random() < 0.15:
        return "get" + "".join(part.capitalize() for part in joined.split("_"))
    if rng.random() < 0.2:
        return rng.choice(("get_{k}_{a}", "{k}_{a}", "{a}_of_{k}", "find_{a}_by_{k}")).format(a=joined, k=kind)
    return rng.choice(NAME_FORMS).format(joined)


def parameter_name(rng: Random, kind: str) -> str:
    return rng.choice(("{}", "{}", "{}", "{}_name", "{}_id", "the_{}")).format(kind)


def value_type(rng: Random) -> str:
    return "integer" if rng.random() < 0.15 else "string"


# Questions.


def entity(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.35:
        return any_name(rng)
    if kind < 0.55:
        return rng.choice(CITIES)
    if kind < 0.65:
        return f"{rng.choice(NAMES)} {pseudo_word(rng).capitalize()}"
    if kind < 0.75:
        return f"{any_word(rng)} {any_word(rng)}"
    return any_word(rng)


def value_of(rng: Random, kind: str) -> str | int:
    return rng.randint(0, 10 ** rng.randint(1, 4)) if kind == "integer" else entity(rng)


def result_value(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.35:
        return str(rng.randint(0, 10 ** rng.randint(1, 6)))
    if kind < 0.6:
        return entity(rng)
    if kind < 0.75:
        return f"{rng.choice(RESULT_WORDS)}, {rng.randint(0, 99)} {rng.choice(UNITS)}"
    if kind < 0.85:
        return f"{rng.randint(0, 99)} {any_word(rng)}"
    return " ".join(any_word(rng) for _ in range(rng.randint(1, 4)))


def result_text(rng: Random, attribute: str, value: str) -> str:
    kind = rng.random()
    if kind < 0.7:
        return value
    if kind < 0.75:
        return json.dumps(value, ensure_ascii=False)
    key = attribute.replace(" ", "_") if kind < 0.88 else "result"
    shown: str | int = int(value) if value.isdigit() else value
    if rng.random() < 0.2:
        return json.dumps({any_word(rng): rng.randint(0, 99), key: shown}, ensure_ascii=False)
    return json.dumps({key: shown}, ensure_ascii=False)


def ask_one(rng: Random, known: Relation) -> Question:
    """Asks for the attribute of a thing, or of two things of different kinds."""
    arguments = {name: value_of(rng, kind) for name, kind in known.tool.parameters}
    value = result_value(rng)
    if len(known.kinds) == 2:
        given = dict(zip(known.kinds, arguments.values(), strict=True))
        kinds = rng.sample(known.kinds, 2)
        what = f"the {known.attribute} for {kinds[0]} {given[kinds[0]]} and {kinds[1]} {given[kinds[1]]}"
    else:
        preposition = rng.choice(("of", "of", "of", "of", "in", "for"))
        (thing,) = arguments.values()
        before = f"the {known.kinds[0]} " if rng.random() < 0.1 else ""
        what = f"the {known.attribute} {preposition} {before}{thing}"
    call = Call(known.tool.name, arguments, result_text(rng, known.attribute, value))
    return Question(
        rng.choice(ASKS).format(what), (Turn(known.looked_up(what), (call,)),), f"{what[0].upper()}{what[1:]} is {value}."
    )


def ask_both(rng: Random, known: Relation) -> Question:
    """Asks for the attribute of two things, with two parallel calls."""
    ((parameter, kind),) = known.tool.parameters
    things = (value_of(rng, kind), value_of(rng, kind))
    values = (result_value(rng), result_value(rng))
    calls = tuple(
        Call(known.tool.name, {parameter: thing}, result_text(rng, known.attribute, value))
        for thing, value in zip(things, values, strict=True)
    )
    parts = (f"the {known.attribute} of {thing} is {value}" for thing, value in zip(things, values, strict=True))
    answer = " and ".join(parts)
    what = f"the {known.attribute} of {things[0]} and of {things[1]}"
    turn = Turn(known.looked_up(what), calls)
    return Question(rng.choice(ASKS).format(what), (turn,), f"{answer[0].upper()}{answer[1:]}.")


def ask_chain(rng: Random, known: list[Relation]) -> Question:
    """Asks for an attribute of an attribute. Each call after the first has the result of the previous one as its argument."""
    (_, kind), *_ = known[0].tool.parameters
    thing = value_of(rng, kind)
    what, turns, value = str(thing), [], thing
    for at, each in enumerate(known):
        ((parameter, _),) = each.tool.parameters
        last = at == len(known) - 1
        found = result_value(rng) if last else entity(rng)
        call = Call(each.tool.name, {parameter: value}, result_text(rng, each.attribute, found))
        turns.append(Turn(each.looked_up(f"the {each.attribute} of {value}"), (call,)))
        what = f"the {each.attribute} of {what}"
        value = found
    return Question(rng.choice(ASKS).format(what), tuple(turns), f"{what[0].upper()}{what[1:]} is {value}.")


def ask_missing(rng: Random, words: Words) -> Question:
    """Asks for an attribute that no tool of the scene returns. The question has no calls, and its answer is UNKNOWN."""
    what = f"the {words.attribute()} of {entity(rng)}"
    return Question(rng.choice(ASKS).format(what), (), UNKNOWN)


def ask_plain(rng: Random, held_out: bool) -> Question:
    """Asks a question that needs no tool."""
    name = rng.choices(list(PLAIN_TASKS), [task.share for task in PLAIN_TASKS.values()])[0]
    question, answer = (sample_held_out if held_out else sample_training)(name, rng)
    return Question(question, (), answer)


@dataclass(frozen=True)
class Scene:
    """A conversation with tools."""

    tools: tuple[Tool, ...]
    questions: tuple[Question, ...]
    system: str = ""
    silent: bool = False  # no text before calls, as in the history of some clients

    def messages(self) -> list[Message]:
        """Returns the whole conversation in the form of the chat API, except that arguments of calls are objects."""
        messages: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        for question in self.questions:
            messages.append({"role": "user", "content": question.text})
            for turn in question.turns:
                text = "" if self.silent else turn.text
                messages.append({"role": "assistant", "content": text, "tool_calls": [as_tool_call(call) for call in turn.calls]})
                messages += [{"role": "tool", "content": call.result} for call in turn.calls]
            messages.append({"role": "assistant", "content": question.answer})
        return messages


def long_message(rng: Random, sentences: int) -> str:
    return " ".join(sentence(rng, rng.randint(3, 12)) for _ in range(sentences))


def as_tool_call(call: Call) -> Message:
    return {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}


KINDS_OF_QUESTION = {"one": 42, "chain": 36, "both": 4, "plain": 15, "missing": 3}


def scene(rng: Random, held_out: bool = False, kind: str = "", turns: int = 1) -> Scene:
    """Draws a scene. All questions have the same `kind` of KINDS_OF_QUESTION. If it is "", kinds are drawn by their shares."""
    words = Words(rng, held_out)
    if not held_out and rng.random() < ALIKE_SHARE:
        words.alike()
    kinds = [kind or rng.choices(list(KINDS_OF_QUESTION), list(KINDS_OF_QUESTION.values()))[0] for _ in range(turns)]
    relations = [relation(words) for _ in range(rng.randint(3 if "chain" in kinds else 1, MOST_TOOLS))]
    while sum(each.chains() for each in relations) < (3 if "chain" in kinds else 1):
        relations.append(relation(words))
    rng.shuffle(relations)
    questions = tuple(ask(rng, each, relations, words, held_out) for each in kinds)
    system = str(system_message(rng)["content"]) if rng.random() < 0.3 else ""
    return Scene(tuple(each.tool for each in relations), questions, system, not held_out and rng.random() < 0.05)


def ask(rng: Random, kind: str, relations: list[Relation], words: Words, held_out: bool) -> Question:
    if kind == "chain":
        chaining = [each for each in relations if each.chains()]
        return ask_chain(rng, rng.sample(chaining, 3 if rng.random() < 0.1 else 2))
    if kind == "one":
        return ask_one(rng, rng.choice(relations))
    if kind == "both":
        return ask_both(rng, rng.choice([each for each in relations if len(each.kinds) == 1]))
    return ask_missing(rng, words) if kind == "missing" else ask_plain(rng, held_out)


# The form of the chat template.


def turns_of(messages: list[Message], tools: tuple[Tool, ...]) -> list[tuple[str, str]]:
    """Returns (role, text) of every turn. A system message ends with the tools' lines. An answer's calls follow its text."""
    turns = [(message["role"], turn_text(message)) for message in messages]
    if not tools:
        return turns
    listed = "\n".join(("Tools:", *(tool.line() for tool in tools)))
    if turns[0][0] == "system":
        return [("system", f"{turns[0][1]}\n\n{listed}"), *turns[1:]]
    return [("system", listed), *turns]


def turn_text(message: Message) -> str:
    called = [each["function"] for each in message.get("tool_calls", ())]
    texts = [Call(each["name"], each["arguments"], "").text() for each in called]
    return "\n".join(filter(None, (message["content"], *texts)))
