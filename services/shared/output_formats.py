"""How models write calls of tools and reasoning: the formats' names, their special tokens, and which of them a template uses.

Sources are the models' own chat templates and, for harmony, https://github.com/openai/harmony/blob/main/docs/format.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

NONE = ""
_THINK = ("<think>", "</think>")
_CALL_MARKS = ("<tool_call>", "</tool_call>")
_DEEPSEEK = (
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    "<｜tool▁sep｜>",
)
_HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>")

# Marks that a tokenizer may have as special tokens, by format.
TOOL_FORMATS: Mapping[str, tuple[str, ...]] = {
    "hermes": _CALL_MARKS,
    "qwen3_coder": _CALL_MARKS,
    "llama3_json": ("<|python_tag|>",),
    "pythonic": ("<|python_start|>", "<|python_end|>"),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "harmony": _HARMONY,
    NONE: (),
}
REASONING_FORMATS: Mapping[str, tuple[str, ...]] = {
    "think": _THINK,
    "think_open": _THINK,
    "mistral_think": ("[THINK]", "[/THINK]"),
    "harmony": _HARMONY,
    NONE: (),
}
_GENERATION = "add_generation_prompt"
# Calls as instructions show them, with words where a call has its values.
_WORDS = r"[A-Za-z][\w .\-]*"
_OBJECT_EXAMPLE = re.compile(
    rf'\[?\{{\s*"name":\s*(?:"{_WORDS}"|<{_WORDS}>|\[{_WORDS}\]|{_WORDS}),\s*"(?:parameters|arguments)":'
)
_PYTHON_EXAMPLE = re.compile(r"\[func(?:tion)?_?name\w*\(\w+=")


@dataclass(frozen=True, slots=True)
class OutputFormats:
    """tools: a key of TOOL_FORMATS. reasoning: a key of REASONING_FORMATS: `think` where the output may begin with the opening
    mark, `think_open` where the prompt ends with it. Harmony is both or neither."""

    tools: str = NONE
    reasoning: str = NONE

    @property
    def kept(self) -> tuple[str, ...]:
        """The texts of special tokens that a parser needs to see, whether or not the client has them skipped."""
        return tuple(dict.fromkeys((*TOOL_FORMATS[self.tools], *REASONING_FORMATS[self.reasoning])))

    @property
    def reasoning_pair(self) -> tuple[str, ...]:
        """The opening and the closing mark, where the format has just these."""
        marks = REASONING_FORMATS[self.reasoning]
        return marks if len(marks) == 2 else ()

    def after(self, prompt: str) -> OutputFormats:
        """prompt: rendered, or the end of it. Whether it opens the reasoning depends, in many templates, on the request."""
        if self.reasoning not in ("think", "think_open"):
            return self
        opened = prompt.rstrip().endswith(_THINK[0])
        return OutputFormats(self.tools, "think_open" if opened else "think")


def detect_in(chat_templates: Mapping[str, str]) -> OutputFormats:
    """chat_templates: a model's own, by name. One for tools says how it writes calls of them."""
    return detect(chat_templates.get("tool_use") or chat_templates.get("default", ""))


def known(tools: str, reasoning: str) -> OutputFormats:
    """Of a peer that may know more formats."""
    return OutputFormats(tools if tools in TOOL_FORMATS else NONE, reasoning if reasoning in REASONING_FORMATS else NONE)


def detect(chat_template: str) -> OutputFormats:
    """By the marks in the template's source, else by its instruction to the model. Formats that are not known here are none."""
    if "<|channel|>" in chat_template and "<|message|>" in chat_template:
        return OutputFormats("harmony", "harmony")
    return OutputFormats(_tools(chat_template), _reasoning(chat_template))


def _tools(template: str) -> str:
    if _DEEPSEEK[0] in template:
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    if "<tool_call>" in template:
        return _between_call_marks(template)
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_start|>" in template:
        return "pythonic"
    return "llama3_json" if "<|python_tag|>" in template else _in_words(template)


def _in_words(template: str) -> str:
    """The format that an instruction shows to the model, e.g. `{"name": function name, "parameters": …}`.

    An example behind a mark or a word of its own belongs to a format that is not known here.
    """
    text = template.replace('\\"', '"').replace("\\n", "\n")
    for example, name in ((_OBJECT_EXAMPLE, "llama3_json"), (_PYTHON_EXAMPLE, "pythonic")):
        for found in example.finditer(text):
            before = text[: found.start()]
            if not before[-1:].isalnum() and not before.rstrip().endswith((">", "]", "```", "```json")):
                return name
    return NONE


def _between_call_marks(template: str) -> str:
    """GLM has the same marks around `<arg_key>`, and MiniMax around `<invoke`."""
    if "<function=" in template:
        return "qwen3_coder"
    return NONE if "<arg_key>" in template or "<invoke" in template else "hermes"


def _reasoning(template: str) -> str:
    """A generation prompt that has both marks, or the opening one beside a condition, leaves it to the request."""
    if "[THINK]" in template:
        return "mistral_think"
    if _THINK[1] not in template:
        return "think" if _THINK[0] in template else NONE
    prompt = template.rpartition(_GENERATION)[2]
    return "think_open" if _THINK[0] in prompt and _THINK[1] not in prompt else "think"
