"""The command `rootstock batch`: runs a file of requests through OpenAI's files and batches APIs and fetches the results."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rootstock_llm.services.cli.batch.transfer import content_of, endpoint_of, with_progress
from rootstock_llm.services.cli.shared.exits import CommandFailed, Exit
from rootstock_llm.services.cli.shared.flags import add_server_flags, target_of
from rootstock_llm.services.cli.shared.server import Server
from rootstock_llm.services.cli.shared.terminal import Terminal
from rootstock_llm.services.shared.observe.progress import Progress

FILES, BATCHES = "/v1/files", "/v1/batches"
ENDED = ("completed", "failed", "expired", "cancelled")
POLL_S = 2.0  # seconds between two requests for a batch's status


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=list(ACTIONS), help="operation on batches")
    parser.add_argument("file_or_id", nargs="?", metavar="FILE|ID", help="file to submit, or id of the batch")
    parser.add_argument("--endpoint", metavar="PATH", help="submit: endpoint of the lines; default: the first line's url")
    parser.add_argument("--window", default="24h", help="submit: time after which unfinished lines expire (%(default)s)")
    parser.add_argument("--wait", action="store_true", help="submit, status: wait until the batch has ended")
    parser.add_argument("--errors", action="store_true", help="results: fetch the failed lines instead of the completed ones")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="results: file to write; default: stdout")
    parser.add_argument("--json", action="store_true", help="print batches as lines of JSON")
    add_server_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the batch action that the command line names. Raises CommandFailed."""
    if args.file_or_id is None and args.action != "list":
        raise CommandFailed(
            Exit.USAGE, f"batch {args.action} needs {'a file' if args.action == 'submit' else 'the id of a batch'}."
        )
    return ACTIONS[args.action](args, Server(target_of(args, os.environ)))


def _submit(args: argparse.Namespace, server: Server) -> Exit:
    path = Path(args.file_or_id)
    endpoint = args.endpoint or endpoint_of(path)
    file = _object(server.upload(FILES, content_of(path, Terminal.of(sys.stderr))))
    body = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": args.window}
    batch = _object(server.post(BATCHES, body))
    if args.wait:
        return _wait(batch, args, server)
    _print_batch(batch, args)
    return Exit.DONE


def _status(args: argparse.Namespace, server: Server) -> Exit:
    batch = _object(server.get(_path(args.file_or_id)))
    if args.wait:
        return _wait(batch, args, server)
    _print_batch(batch, args)
    return Exit.DONE


def _list(args: argparse.Namespace, server: Server) -> Exit:
    """Prints all batches, the newest first. Requests every page of the list."""
    after = ""
    while True:
        page = server.get(f"{BATCHES}?limit=100{after}")
        batches = page.get("data") if isinstance(page, dict) else None
        for batch in batches or ():
            _print_batch(_object(batch), args)
        if not batches or not page.get("has_more"):
            return Exit.DONE
        after = f"&after={quote(batches[-1]['id'], safe='')}"


def _cancel(args: argparse.Namespace, server: Server) -> Exit:
    _print_batch(_object(server.post(f"{_path(args.file_or_id)}/cancel", {})), args)
    return Exit.DONE


def _results(args: argparse.Namespace, server: Server) -> Exit:
    batch = _object(server.get(_path(args.file_or_id)))
    if batch["status"] not in ENDED:
        raise CommandFailed(
            Exit.FAILED, f"the batch is {batch['status']}: wait for it with `rootstock batch status {args.file_or_id} --wait`."
        )
    file = batch.get("error_file_id" if args.errors else "output_file_id")
    if not file:
        result, other = ("failed", "without") if args.errors else ("was completed", "with")
        raise CommandFailed(Exit.FAILED, f"no line of the batch {result}: repeat the command {other} --errors.")
    path, err = f"{FILES}/{quote(file, safe='')}", Terminal.of(sys.stderr)
    total = _object(server.get(path)).get("bytes") or 0 if err.is_tty and args.output is not None else 0
    with closing(server.pieces(f"{path}/content")) as pieces:
        if args.output is None:
            for piece in pieces:
                sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
            return Exit.DONE
        try:
            part = args.output.with_name(f"{args.output.name}.part")  # a partial download never replaces an earlier file
            with part.open("wb") as out:
                out.writelines(with_progress(pieces, "results", total, err))
            part.replace(args.output)
        except OSError as error:
            raise CommandFailed(Exit.FAILED, f"{args.output} cannot be written ({error.strerror}): name another file.") from None
    return Exit.DONE


ACTIONS: Mapping[str, Callable[[argparse.Namespace, Server], Exit]] = {
    "submit": _submit,
    "status": _status,
    "list": _list,
    "cancel": _cancel,
    "results": _results,
}


def _wait(batch: dict[str, Any], args: argparse.Namespace, server: Server) -> Exit:
    """Polls a batch until it has ended, and then prints it. Shows a progress bar on a terminal.

    Polling ends if the server has been unreachable or overloaded for --timeout seconds.
    """
    err, begun = Terminal.of(sys.stderr), time.monotonic()
    responded_at = begun
    while batch["status"] not in ENDED:
        if err.is_tty:
            done, total = _counts(batch)
            err.overwrite(Progress("batch", done, total, time.monotonic() - begun, "lines").bar() if total else batch["status"])
        time.sleep(POLL_S)
        try:
            batch, responded_at = _object(server.get(_path(batch["id"]))), time.monotonic()
        except CommandFailed as error:
            if not error.is_temporary or time.monotonic() - responded_at > args.timeout:
                raise
    if err.is_tty:
        err.overwrite("")
    _print_batch(batch, args)
    return Exit.DONE if batch["status"] == "completed" else Exit.FAILED


def _print_batch(batch: dict[str, Any], args: argparse.Namespace) -> None:
    out = Terminal.of(sys.stdout)
    done, total = _counts(batch)
    failed = (batch.get("request_counts") or {}).get("failed") or 0
    out.write(json.dumps(batch) if args.json else f"{batch['id']}  {batch['status']}  {done} of {total} lines, {failed} failed")
    out.line()
    for fault in (batch.get("errors") or {}).get("data") or ():
        where = f"line {fault['line']}: " if fault.get("line") is not None else ""
        Terminal.of(sys.stderr).write(f"{where}{fault.get('message')}\n")


def _counts(batch: dict[str, Any]) -> tuple[int, int]:
    """Returns the number of finished lines and the number of all lines. Failed lines count as finished."""
    counts = batch.get("request_counts") or {}
    return (counts.get("completed") or 0) + (counts.get("failed") or 0), counts.get("total") or 0


def _path(batch_id: str) -> str:
    return f"{BATCHES}/{quote(batch_id, safe='')}"


def _object(response: Any) -> dict[str, Any]:
    """Returns the response if it is the object of a file or a batch. Raises CommandFailed otherwise."""
    valid = isinstance(response, dict) and isinstance(response.get("id"), str) and isinstance(response.get("status", ""), str)
    if not valid:
        raise CommandFailed(Exit.FAILED, "the server's response is not the JSON object of a file or a batch: check --url.")
    result: dict[str, Any] = response
    return result
