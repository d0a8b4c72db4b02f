"""The formats in which models write tool calls and reasoning: names, delimiters, and detection from a chat template.

Sources are the models' chat templates and, for harmony, https://github.com/openai/harmony/blob/main/docs/format.md.
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

# The delimiters ("marks") of each format. A tokenizer may have them as special tokens.
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
# Example calls in the instructions of chat templates, with placeholder words for the values.
_WORDS = r"[A-Za-z][\w .\-]*"
_OBJECT_EXAMPLE = re.compile(
    rf'\[?\{{\s*"name":\s*(?:"{_WORDS}"|<{_WORDS}>|\[{_WORDS}\]|{_WORDS}),\s*"(?:parameters|arguments)":'
)
_PYTHON_EXAMPLE = re.compile(r"\[func(?:tion)?_?name\w*\(\w+=")


@dataclass(frozen=True, slots=True)
class OutputFormats:
    """The formats of a model's tool calls and reasoning."""

    tools: str = NONE  # a key of TOOL_FORMATS
    # A key of REASONING_FORMATS. `think`: the output may begin with the opening mark. `think_open`: the prompt already ends with
    # the opening mark. `harmony` is only used together with the tool format `harmony`.
    reasoning: str = NONE

    @property
    def kept(self) -> tuple[str, ...]:
        """Texts of the special tokens that parsers need in the text, even if the request sets skip_special_tokens."""
        return tuple(dict.fromkeys((*TOOL_FORMATS[self.tools], *REASONING_FORMATS[self.reasoning])))

    @property
    def reasoning_pair(self) -> tuple[str, ...]:
        """The opening and the closing mark of the reasoning, or () if the format has no such pair."""
        marks = REASONING_FORMATS[self.reasoning]
        return marks if len(marks) == 2 else ()

    def after(self, prompt: str) -> OutputFormats:
        """Returns the formats of the output of one request, whose prompt may already have opened the reasoning.

        Args:
            prompt: the rendered prompt, or its end.
        """
        if self.reasoning not in ("think", "think_open"):
            return self
        reasoning = "think_open" if prompt.rstrip().endswith(_THINK[0]) else "think"
        return self if reasoning == self.reasoning else OutputFormats(self.tools, reasoning)


def detect_in(chat_templates: Mapping[str, str]) -> OutputFormats:
    """Detects the formats from a model's chat templates (by name). Uses the template `tool_use` if there is one."""
    return detect(chat_templates.get("tool_use") or chat_templates.get("default", ""))


def known(tools: str, reasoning: str) -> OutputFormats:
    """Returns the formats that another service reports, with NONE for a format that this version does not know."""
    return OutputFormats(tools if tools in TOOL_FORMATS else NONE, reasoning if reasoning in REASONING_FORMATS else NONE)


def detect(chat_template: str) -> OutputFormats:
    """Detects the formats from the marks or the instructions in a template's source. NONE: no known format was found."""
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
    """Returns the format of an example call in the template's instructions, e.g. `{"name": function name, "parameters": …}`.

    An example directly after a mark or a word belongs to an unknown format and is ignored.
    """
    text = template.replace('\\"', '"').replace("\\n", "\n")
    for example, name in ((_OBJECT_EXAMPLE, "llama3_json"), (_PYTHON_EXAMPLE, "pythonic")):
        for found in example.finditer(text):
            before = text[: found.start()]
            if not before[-1:].isalnum() and not before.rstrip().endswith((">", "]", "```", "```json")):
                return name
    return NONE


def _between_call_marks(template: str) -> str:
    """Returns the format of calls between <tool_call> marks.

    NONE for templates of GLM (`<arg_key>`) and MiniMax (`<invoke`), which have the same marks around other formats.
    """
    if "<function=" in template:
        return "qwen3_coder"
    return NONE if "<arg_key>" in template or "<invoke" in template else "hermes"


def _reasoning(template: str) -> str:
    """Returns the reasoning format.

    If the template's generation prompt has both marks, the format is `think`, because the request decides whether the rendered
    prompt opens the reasoning.
    """
    if "[THINK]" in template:
        return "mistral_think"
    if _THINK[1] not in template:
        return "think" if _THINK[0] in template else NONE
    prompt = template.rpartition(_GENERATION)[2]
    return "think_open" if _THINK[0] in prompt and _THINK[1] not in prompt else "think"
