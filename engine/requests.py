"""Who has asked, what each is told, and how each request ends. It decides nothing, and knows no tensors and no pipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from engine.limits import Limits
from engine.lines import Lines
from engine.protocol import Event, FinishReason, RejectCode, Rejected, Tokens
from engine.restoring import Restoring
from engine.sequence import Request, Sequence


class Requests:
    """Every request that has not ended, by its id, and the events since somebody took them."""

    def __init__(self, lines: Lines, restoring: Restoring, clock: Callable[[], float]) -> None:
        self._lines, self._restoring, self._clock = lines, restoring, clock
        self._known: dict[str, Request] = {}
        self._events: list[Event] = []
        self.sampled_tokens = 0

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._known.values()))

    def get(self, request_id: str) -> Request | None:
        """The request of this id; None where it has ended, or never was."""
        return self._known.get(request_id)

    def add(self, request: Request) -> None:
        """It waits for its turn."""
        self._known[request.submit.request_id] = request
        self._lines.wait(request.samples[0])

    def take_events(self) -> list[Event]:
        """The events since the last call."""
        events, self._events = [*self._events, *self._restoring.take_answers()], []
        return events

    def deliver(self, sequence: Sequence, ids: list[int], limits: Limits) -> None:
        """Hand a sequence its tokens, of which none but the last may end it.

        Where the prompt ends that several samples share, there is one for each; they start to wait for their turn.
        """
        request = sequence.request
        drawing = request.drawing(sequence)
        forked = request.fork() if len(drawing) > 1 else []
        for sample, new in zip(drawing, [[token] for token in ids] if forked else [ids], strict=True):
            sample.sampled(new, self._clock())
            self.sampled_tokens += len(new)
            self._events.append(Tokens(request_id=request.submit.request_id, index=sample.index, token_ids=new))
            if new[-1] in request.stop_ids:
                self.finish(sample, "stop")
            elif sample.tokens_left == 0:
                clipped = request.max_tokens < request.submit.max_tokens
                self.finish(sample, "length", limits.context_full if clipped else "")
            elif sample in forked:
                self._lines.wait(sample)

    def finish(self, sequence: Sequence, reason: FinishReason, detail: str = "") -> None:
        """End one sample; with the last one the request ends."""
        self._restoring.ended(sequence)
        self.take_out(sequence)
        sequence.ended = True
        self._events.append(sequence.finished(reason, self._clock(), detail))
        if sequence.request.ended:
            del self._known[sequence.request.submit.request_id]

    def reject(self, request: Request, code: RejectCode, message: str, *, retryable: bool = False) -> None:
        """End a request in an error."""
        for sequence in request.samples:
            self.take_out(sequence)
        request_id = request.submit.request_id
        del self._known[request_id]
        self._events.append(Rejected(request_id=request_id, code=code, message=message, retryable=retryable))

    def take_out(self, sequence: Sequence) -> None:
        """Out of whatever line it stands in, and its lease back."""
        self._restoring.abandon(sequence.restore)
        sequence.restore = None
        self._lines.leave(sequence)

    def announce(self) -> None:
        """Tell each request once that it waits."""
        for sequence in self._lines.waiting:
            if not sequence.announced:
                sequence.announced = True
                self.progress(sequence, "waiting")

    def progress(self, sequence: Sequence, state: Literal["waiting", "reading"]) -> None:
        """Tell how far a request's prompt is."""
        if sequence.index == 0:  # the others have no prompt of their own to read
            self._events.append(sequence.progress(state))
