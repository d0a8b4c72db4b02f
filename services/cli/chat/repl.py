"""The chat at a terminal. A line is a message; a line that begins with a slash is a command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rootstock_llm.services.cli.chat.conversation import Conversation
from rootstock_llm.services.cli.shared.answers import CHAT, Answer, ask
from rootstock_llm.services.cli.shared.exits import CommandFailed, Exit
from rootstock_llm.services.cli.shared.requests import models_of
from rootstock_llm.services.cli.shared.server import Server
from rootstock_llm.services.cli.shared.terminal import Terminal

PROMPT, CONTINUED = "> ", ". "
HELP = """\
/reset         remove all messages
/model [NAME]  switch to another model; without NAME: list the models
/system [TEXT] set the system prompt; without TEXT: show it
/save FILE     write the conversation as JSON
/exit          leave; Ctrl-D leaves, too
A line that ends with \\ continues in the next line. Ctrl-C stops an answer."""


class Repl:
    """Reads lines, sends them as messages, and prints the answers, until the user leaves."""

    def __init__(
        self,
        server: Server,
        conversation: Conversation,
        read: Callable[[str], str],
        out: Terminal,
        err: Terminal,
        shows_stats: bool,
    ) -> None:
        """Creates a chat that has not begun.

        Args:
            read: reads a line after printing a prompt; raises EOFError and KeyboardInterrupt as input() does.
            out: terminal for answers.
            err: terminal for everything else.
            shows_stats: whether to print tokens and times after each answer.
        """
        self._server, self._conversation = server, conversation
        self._read, self._out, self._err = read, out, err
        self._shows_stats = shows_stats
        self._commands = {
            "reset": self._reset,
            "model": self._model,
            "system": self._system,
            "save": self._save,
            "help": self._help,
        }

    def run(self) -> Exit:
        self._note(f"{self._conversation.model} at {self._server.target.url}; /help for commands, Ctrl-D to leave")
        while True:
            try:
                line = self._message()
            except KeyboardInterrupt:
                self._note("\n(Ctrl-D leaves)")
                continue
            except EOFError:
                self._out.line()
                return Exit.DONE
            if line == "/exit":
                return Exit.DONE
            if line.startswith("/"):
                self._interruptible(line)
            elif line:
                self._turn(line)

    def _interruptible(self, line: str) -> None:
        try:
            self._command(line)
        except KeyboardInterrupt:
            self._note("\n(stopped)")

    def _message(self) -> str:
        line = self._read(PROMPT)
        while line.endswith("\\"):
            line = f"{line[:-1]}\n{self._read(CONTINUED)}"
        return line.strip()

    def _turn(self, text: str) -> None:
        """Sends a message and prints the answer. Ctrl-C keeps the partial answer in the conversation; an error drops the turn."""
        answer = Answer()
        try:
            ask(self._server, CHAT, self._conversation.body(text), answer, self._show)
        except KeyboardInterrupt:
            self._note("\n(stopped)")
        except CommandFailed as error:
            self._err.line(f"{self._newline(answer)}{self._err.painted(f'rootstock: {error}', 'red')}")
            return
        else:
            self._out.line()
            self._after(answer)
        if answer.text:
            self._conversation.add(text, answer.text)

    def _after(self, answer: Answer) -> None:
        if answer.tool_calls:
            self._note("(the model called a tool; this chat cannot run tools)")
        if self._shows_stats:
            self._note(f"({answer.figures()})")

    def _show(self, piece: str, is_reasoning: bool) -> None:
        self._out.write(piece, "dim" if is_reasoning else "")

    def _newline(self, answer: Answer) -> str:
        return "\n" if answer.text or answer.reasoning else ""

    def _note(self, text: str) -> None:
        self._err.line(self._err.painted(text, "dim"))

    def _command(self, line: str) -> None:
        name, _, argument = line[1:].partition(" ")
        command = self._commands.get(name)
        if command is None:
            self._note(f"there is no command /{name}; /help lists the commands")
            return
        command(argument.strip())

    def _reset(self, argument: str) -> None:
        self._conversation.reset()
        self._note("all messages are removed")

    def _model(self, name: str) -> None:
        try:
            names = [str(model["id"]) for model in models_of(self._server)]
        except CommandFailed as error:
            self._note(f"rootstock: {error}")
            return
        if name in names:
            self._conversation.model = name
        listed = ", ".join(f"{each} (this one)" if each == self._conversation.model else each for each in names)
        self._note(f"there is no model {name}; the models are: {listed}" if name and name not in names else listed)

    def _system(self, text: str) -> None:
        if text:
            self._conversation.system = text
        self._note(self._conversation.system or "none")

    def _save(self, name: str) -> None:
        if not name:
            self._note("name a file: /save FILE")
            return
        try:
            self._conversation.save(Path(name).expanduser())
        except OSError as error:
            self._note(f"{name} cannot be written: {error.strerror}")
            return
        except RuntimeError:  # expanduser() finds no such user
            self._note(f"{name} cannot be written: there is no home folder of this user")
            return
        self._note(f"{self._conversation.num_turns} turns in {name}")

    def _help(self, argument: str) -> None:
        self._note(HELP)
