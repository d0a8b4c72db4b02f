"""The outputs that the loop has not taken yet: one PeerOutput for each gateway and step."""

from __future__ import annotations

from services.worker.core.contracts.messages import Finish, PagesReady, PeerOutput
from services.worker.core.contracts.plan import PromptLogprobs
from services.worker.core.requests.request import Request


class Outputs:
    def __init__(self) -> None:
        self._peers: dict[int, PeerOutput] = {}

    def _peer(self, peer: int) -> PeerOutput:
        output = self._peers.get(peer)
        if output is None:
            output = self._peers[peer] = PeerOutput(peer)
        return output

    def add_rows(self, peer: int, handles: list[int], counts: list[int], tokens: list[int]) -> None:
        assert len(handles) == len(counts) <= len(tokens), "each handle has a count, and a token at least"
        output = self._peer(peer)
        output.handles += handles
        output.counts += counts
        output.tokens += tokens

    def add_news(self, request: Request) -> None:
        """Adds the unsent tokens of one request, with their logprobs and the results of its prediction."""
        self._add_tokens(request)
        self.add_predicted(request)

    def _add_tokens(self, request: Request) -> None:
        assert request.progress.num_sent <= len(request.progress.output_ids), "the gateway has no more tokens than the output"
        tokens = request.progress.output_ids[request.progress.num_sent :]
        if not tokens:
            return
        self.add_rows(request.peer, [request.handle], [len(tokens)], tokens)
        self.add_logprobs(request, request.progress.num_sent, len(request.progress.output_ids))
        request.progress.num_sent = len(request.progress.output_ids)

    def add_logprobs(self, request: Request, first: int, end: int) -> None:
        """Adds the logprobs of the output tokens from `first` to `end`, if wanted. The same message has these tokens."""
        if request.wants_logprobs:
            assert request.progress.num_given <= first < end, "logprobs are of tokens sampled here"
            rows = request.progress.logprobs[first - request.progress.num_given : end - request.progress.num_given]
            self._peer(request.peer).logprobs.append((request.handle, rows))

    def add_predicted(self, request: Request) -> None:
        """Adds the verification results of a request with a prediction."""
        if len(request.prediction):
            self._peer(request.peer).predicted.append((request.handle, request.progress.verified))

    def add_prompt_logprobs(self, request: Request, values: PromptLogprobs) -> None:
        self._peer(request.peer).prompt_logprobs.append((request.handle, values))

    def add_ready(self, peer: int, ready: PagesReady) -> None:
        self._peer(peer).ready.append(ready)

    def add_finish(self, request: Request, finish: Finish) -> None:
        """Adds the unsent tokens of a request, and then its terminal output."""
        self.add_news(request)
        self._peer(request.peer).finishes.append(finish)

    def add_refusal(self, peer: int, finish: Finish) -> None:
        self._peer(peer).finishes.append(finish)

    def take(self) -> tuple[PeerOutput, ...]:
        peers = tuple(self._peers.values())
        self._peers.clear()
        return peers
