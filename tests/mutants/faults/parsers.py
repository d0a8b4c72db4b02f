"""Seeded faults in grammars for tool calls and in the gateway's output parsers.

The tests of a fault's area (areas.py) must detect the fault.
"""

from __future__ import annotations

from tests.mutants.fault import of

PARSERS = (
    *of(
        "parsers",
        "services/gateway/output/tags/json_calls.py",
        ('_objects(demand, "", "parameters", "")', '_objects(demand, "", "arguments", "")'),
        ('f"{_CALL}{tool.name}{_SEPARATOR}", demand', 'f"{_CALL}{tool.name}", demand'),
        ('{tool.name}[ARGS]", demand.arguments(tool), "")', '{tool.name}", demand.arguments(tool), "")'),
        ('"<tool_call>\\n", "arguments"', '"<tool_call>", "arguments"'),
    ),
    *of(
        "parsers",
        "services/gateway/output/tags/structural_tags.py",
        ('"deepseek_v3": deepseek_v3,', '"deepseek_v3": deepseek_v31,'),
        ('"harmony": lambda demand, _: harmony(demand),', '"harmony": hermes,'),
    ),
    *of(
        "parsers",
        "services/gateway/output/formats/deepseek.py",
        ("yield from reading.closed_by(FENCE_END)", "pass"),
    ),
    *of(
        "parsers",
        "services/gateway/output/formats/json_calls.py",
        (
            '        yield from source.choose((",",))\n        yield from source.space()\n        return not',
            "        yield from source.space()\n        return not",
        ),
    ),
    *of(
        "parsers",
        "services/gateway/output/formats/families.py",
        ("if trial.failed or trial.writer.wrote_text:", "if trial.writer.wrote_text:"),
        ("and not source.was_cut:", "and True:"),
    ),
    *of(
        "parsers",
        "services/gateway/output/json_text.py",
        ('out.hold(",")', 'out.show(",")'),
        ("if self._source.was_cut:", "if False:"),
    ),
)
