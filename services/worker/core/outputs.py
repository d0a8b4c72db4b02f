"""Collects what front ends are to be told until the loop takes it: one PeerOutput per front end per step."""

from __future__ import annotations

from collections.abc import Sequence

from services.worker.core.messages import Finish, PeerOutput


class Outputs:
    def __init__(self) -> None:
        self._peers: dict[int, PeerOutput] = {}

    def _peer(self, peer: int) -> PeerOutput:
        output = self._peers.get(peer)
        if output is None:
            output = self._peers[peer] = PeerOutput(peer)
        return output

    def add_rows(self, peer: int, handles: list[int], counts: list[int], tokens: list[int]) -> None:
        output = self._peer(peer)
        output.handles += handles
        output.counts += counts
        output.tokens += tokens

    def add_finish(self, peer: int, finish: Finish, tokens: Sequence[int]) -> None:
        """The terminal output, with the tokens that were not sent yet."""
        output = self._peer(peer)
        if tokens:
            output.handles.append(finish.handle)
            output.counts.append(len(tokens))
            output.tokens.extend(tokens)
        output.finishes.append(finish)

    def take(self) -> tuple[PeerOutput, ...]:
        peers = tuple(self._peers.values())
        self._peers.clear()
        return peers
