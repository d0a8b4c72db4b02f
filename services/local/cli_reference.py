"""python -m services.local.cli_reference prints docs/reference/cli.md.

It reads the parser of the client and the picture in docs/pictures/status.txt.
"""

from __future__ import annotations

import re
from pathlib import Path

from services.cli.commands import COMMANDS, EXITS, build_parser
from services.cli.completion import CommandWords, Word, commands_of

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "pictures" / "status.txt"
HEAD = """\
# The client

Written by `make docs` from the code. `rootstock` is what `pip install` of this repository puts on the path
(`.venv/bin/rootstock` after `make env`); `.venv/bin/python -m services.cli` is the same. It needs Python's own library alone,
and speaks to any server with OpenAI's API; `status` to Rootstock's gateway. `bench` takes aiohttp and what the services take.

The server is `--url`, else `$ROOTSTOCK_URL`, else this machine's port 8000. An [API key](../how-to/keys.md) comes from
`$ROOTSTOCK_API_KEY` or the file that `--api-key-file` names: arguments of a process are seen by all users of a machine, so no
flag takes it.

Answers go to stdout as they come, everything else to stderr: an error is one sentence with what to do. `--json` prints one line
of JSON for each result. There are no colours where stdout is no terminal, or `NO_COLOR` is set.

"""
STATUS = """
Figures of a worker are those that it told last, over all gateways: what runs and waits there, the share of its KV pool that
running requests use, the share of prompt tokens that its cache had since its start, tokens generated per second lately,
retractions since its start. The queue is that of the gateway which is asked. On a terminal the table is drawn anew every
second. States: `ready`; `silent` (it has told nothing for two and a half seconds); `paused`, `draining`, `hung`; `unused` (the
gateway gives it nothing for the time being, as after faults); `lost` (it was connected); `starting` (it never was); `gone` (the
gateway does not know it any more: shown for a minute).

Below the table stands what is wrong, a sentence each with where to look: models that nobody can answer for, a service that is
not connected, workers that hang, are left alone after faults, or have no memory for what waits; and of what the gateway stands
on, names that cannot be looked up, a Redis that does not answer, files of keys or certificates that are wrong, metrics that
nobody asks for any more. It is what a gateway tells (`GET /server_info`). Drivers, RuntimeClasses and volumes are seen in the
cluster alone: there it names the check of `helm test` that says more
([which sees what](../how-to/kubernetes/diagnosis.md#from-outside)).

While load runs, just after one of three workers was killed:

<!-- output: example -->
"""
CHAT = """
Without `-m` and a pipe it is a conversation: `/reset`, `/model [NAME]`, `/system [TEXT]`, `/save FILE`, `/help`, `/exit`.
Ctrl-C stops an answer, which counts as said as far as it came; Ctrl-D leaves.
"""
BATCH = """
A line of the file is `{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}`; all go to one
endpoint. With `--wait`, status is 0 where the batch completed and 1 where it did not. `results` prints the lines that were
answered, `--errors` those that were not.
"""
CONTROL = """
[What each operation does](control.md). Names and values of flags that are not given come from `ROOTSTOCK_` variables of the
environment, as `ROOTSTOCK_CONTROL_TOKEN`.
"""
SIM = """
[What is simulated, and the figures](../how-to/simulator.md). Each action has its own `--help`.
"""
# Blocks that make what the examples of a command need, and the marks of tests/docs_commands before the examples.
NEEDED = {
    "batch": """\
A file with a line per request:

<!-- run -->
```
cat > requests.jsonl <<'END'
{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "demo", "prompt": "12 + 30 =", "max_tokens": 8}}
END
```

""",
    "keys": """\
A file with one key, which is printed once, to stderr:

<!-- run -->
```
.venv/bin/rootstock keys new team-b > entry.json
echo "{\\"keys\\": [$(cat entry.json)]}" > keys.json
```

""",
}
SYSTEM = "run: with make run"
MARKS = {
    **dict.fromkeys(("chat", "complete", "models", "status", "bench", "batch"), SYSTEM),
    "control": """run: with make run RUN_FLAGS="--worker-flags='--control-port 9203'\"""",
}
FURTHER = {"chat": CHAT, "status": STATUS, "batch": BATCH, "control": CONTROL, "sim": SIM}


def render() -> str:
    parts = [HEAD, "<!-- output: format -->\n", _fenced(EXITS)]
    for command in commands_of(build_parser()):
        parts += [f"\n## {command.name}\n\n{COMMANDS[command.name].summary.capitalize()}.\n\n"]
        parts += [NEEDED.get(command.name, ""), f"<!-- {MARKS.get(command.name, 'run')} -->\n"]
        parts += [_fenced("\n".join(map(_from_a_checkout, COMMANDS[command.name].examples))), FURTHER.get(command.name, "")]
        parts += [_fenced(PICTURE.read_text().rstrip("\n"))] if command.name == "status" else []
        parts += [_table(command)]
    return "".join(parts)


def _from_a_checkout(example: str) -> str:
    return re.sub(r"\brootstock (?=[a-z])", ".venv/bin/rootstock ", example)


def _fenced(text: str) -> str:
    return f"```\n{text}\n```\n"


def _table(command: CommandWords) -> str:
    rows = "".join(f"| {_spelled(word)} | {word.text} |\n" for word in command.words if "--help" not in word.names)
    return f"\n| flag | |\n| --- | --- |\n{rows}"


def _spelled(word: Word) -> str:
    names = ", ".join(f"`{name}`" for name in word.names) or "the argument"
    return f"{names}: {', '.join(f'`{choice}`' for choice in word.choices)}" if word.choices else names


if __name__ == "__main__":
    print(render(), end="")
