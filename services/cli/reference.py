"""python -m rootstock_llm.services.cli.reference prints docs/reference/cli.md from the parser and docs/pictures/status.txt."""

from __future__ import annotations

import re
from pathlib import Path

from rootstock_llm.services.cli.commands import COMMANDS, EXITS, build_parser
from rootstock_llm.services.cli.completion import CommandWords, Word, commands_of

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "pictures" / "status.txt"
HEAD = """\
# The client

Written by `make docs` from the code. `rootstock` is the program that `pip install` of this repository puts on the path
(`.venv/bin/rootstock` after `make env`); `.venv/bin/python -m rootstock_llm.services.cli` is the same program. It needs only
Python's standard library and works with any server that has OpenAI's API; `status` needs Rootstock's gateway. `serve`, `keys`,
`control`, `sim` and `bench` need the dependencies of the services, and `bench` also aiohttp.

The server is `--url`, else `$ROOTSTOCK_URL`, else this machine's port 8000. An [API key](../how-to/keys.md) comes from
`$ROOTSTOCK_API_KEY` or the file that `--api-key-file` names: all users of a machine see the arguments of a process, so no
flag takes the key.

Answers go to stdout as they arrive, everything else to stderr. An error is one sentence with the remedy. `--json` prints one line
of JSON for each result. There are no colours if stdout is not a terminal or `NO_COLOR` is set.

"""
STATUS = """
The columns of a worker come from its last report, which counts the requests of all gateways: running and waiting requests,
the used share of its KV pool, the cached share of prompt tokens since its start, generated tokens per second, and retractions
since its start. The queue is the queue of this gateway. On a terminal the table is refreshed every second.

| state | meaning |
| --- | --- |
| `ready` | The worker takes requests. |
| `silent` | The worker has sent no report for 2.5 s. |
| `paused`, `draining`, `hung` | The worker takes no requests. |
| `unused` | The gateway sends the worker no requests for a while, for example after faults. |
| `lost` | The connection to the worker has ended. |
| `starting` | The worker has not connected yet. |
| `gone` | The gateway has stopped listing the worker. The table shows it for one more minute. |

Below the table is a sentence for each fault with its remedy: models without a ready worker, services that are not
connected, workers that hang, are unused or have no free memory; DNS names that do not resolve, a Redis that does not respond,
wrong files of keys or certificates, and metrics that are not scraped. The source is the gateway's `GET /server_info`.
Drivers, RuntimeClasses and volumes are visible only inside the cluster. For these, the command names the check of `helm test`
([comparison](../how-to/kubernetes/diagnosis.md#from-outside)).

While load runs, just after one of three workers was killed:

<!-- output: example -->
"""
CHAT = """
Without `-m` and a pipe, the command holds a conversation with these commands: `/reset`, `/model [NAME]`, `/system [TEXT]`,
`/save FILE`, `/help`, `/exit`. Ctrl-C stops an answer and keeps its first part in the conversation. Ctrl-D leaves.
"""
BATCH = """
A line of the file is `{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}`; all lines have the
same endpoint. With `--wait`, the exit status is 0 if the batch completed and 1 if it ended otherwise. `results` prints the
completed lines, `results --errors` the failed lines.
"""
CONTROL = """
[What each operation does](control.md). A flag that is not given takes its value from an environment variable with the prefix
`ROOTSTOCK_`, for example `ROOTSTOCK_CONTROL_TOKEN`.
"""
SERVE = """
`make run` calls this command. Its flags and their defaults are those of
[the launcher](configuration.md#python--m-rootstock_llmserviceslocal). The model precedes the flags.
"""
SIM = """
[The simulator page](../how-to/simulator.md) explains the simulation and its figures. Each action has its own `--help`.
"""
# Text before the examples of a command. Its blocks make the files that the examples read.
PREPARATION = {
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
# Comment before the examples of a command. It tells tests/contracts/test_docs_commands.py how to run them.
MARKS = {
    **dict.fromkeys(("chat", "complete", "models", "status", "bench", "batch"), SYSTEM),
    "serve": "run: serves",
    "control": """run: with make run RUN_FLAGS="--worker-flags='--control-port 9203'\"""",
}
# Text after the examples of a command.
NOTES = {"serve": SERVE, "chat": CHAT, "status": STATUS, "batch": BATCH, "control": CONTROL, "sim": SIM}


def render() -> str:
    parts = [HEAD, "<!-- output: format -->\n", _fenced(EXITS)]
    for command in commands_of(build_parser()):
        parts += [f"\n## {command.name}\n\n{COMMANDS[command.name].summary[0].upper()}{COMMANDS[command.name].summary[1:]}.\n\n"]
        parts += [PREPARATION.get(command.name, ""), f"<!-- {MARKS.get(command.name, 'run')} -->\n"]
        parts += [_fenced("\n".join(map(_from_a_checkout, COMMANDS[command.name].examples))), NOTES.get(command.name, "")]
        parts += [_fenced(PICTURE.read_text().rstrip("\n"))] if command.name == "status" else []
        parts += [_table(command)]
    return "".join(parts)


def _from_a_checkout(example: str) -> str:
    return re.sub(r"\brootstock (?=[a-z])", ".venv/bin/rootstock ", example)


def _fenced(text: str) -> str:
    return f"```\n{text}\n```\n"


def _table(command: CommandWords) -> str:
    rows = "".join(f"| {_flag_names(word)} | {word.text} |\n" for word in command.words if "--help" not in word.names)
    return f"\n| flag | |\n| --- | --- |\n{rows}"


def _flag_names(word: Word) -> str:
    names = ", ".join(f"`{name}`" for name in word.names) or "the argument"
    return f"{names}: {', '.join(f'`{choice}`' for choice in word.choices)}" if word.choices else names


if __name__ == "__main__":
    print(render(), end="")
