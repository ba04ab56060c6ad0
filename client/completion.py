"""What a generation gives back, and the pure part of making it: token ids in, visible text out.

No I/O and no threads here: `Assembler` is fed with the events of one request, by `Stream` or `AsyncStream`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from slotd.client.failure import done_error
from slotd.protocol.errors import RequestError, Value
from slotd.protocol.messages import Done, Event, Prefill, Restored, SnapInline, TokenLogprob, Tokens

if TYPE_CHECKING:
    from slotd.client.tokenizer import Tokenizer

FinishReason = Literal["stop", "length", "cancelled"]

#: Called with (prompt tokens in the cache, prompt tokens in all) while a prompt is read.
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One step of an answer.

    `text` may be empty although there are ids: half a character, or the beginning of a stop string, is
    held back until it is known what it becomes. The last chunk may have text and no ids. `reasoning` is the
    part of the thought that came with it.
    """

    text: str
    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    reasoning: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole answer.

    Attributes:
        text: the visible text, without the stop string and without end-of-text tokens. Empty when the
            prompt was ids and there is no usable tokenizer.
        reasoning: the thought that came first, without its tags; only of chats, where the model's template
            has thoughts. `text` begins behind it, and stop strings are looked for in `text` alone.
        reasoning_tokens: tokens of the thought, the closing tag included.
        reasoning_cut: the thought was closed by `thinking_budget`, not by the model.
        ids: every id the daemon sent, the end-of-text or stop id included; when a stop string ended the
            answer, this may reach past the end of `text`.
        finish_reason: ``stop`` (end of text, a stop id or a stop string), ``length`` or ``cancelled``.
        stop: the stop string or the token id that ended the answer.
        limit: what ended it with ``length``: ``n_gen`` (max_tokens) or ``max_ctx`` (the context is full).
        prompt_tokens: tokens of the prompt.
        cached_tokens: how many of them were not computed again.
        seed: the seed that was used, also when none was given.
        logprobs: one per id when they were asked for, else empty.
        timings: seconds by stage (``prefill_s``, ``decode_s`` ...); the stages sum up to ``wall_s``.
        stages: what was done, in this order: ``restore`` (it began with a slot), ``reuse`` (with tokens that
            the daemon still had), ``prefill``, ``snapshot`` (a slot was filled), ``decode``.
        epoch: the daemon's slot epoch when the request ended.
        id: the request id (`Client.snapshot` takes it as `of`).
    """

    text: str
    reasoning: str = ""
    reasoning_tokens: int = 0
    reasoning_cut: bool = False
    ids: tuple[int, ...]
    finish_reason: FinishReason
    stop: str | int | None = None
    limit: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    seed: int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    timings: dict[str, float] = field(default_factory=dict)
    stages: tuple[str, ...] = ()
    epoch: int = 0
    id: str = ""

    @property
    def is_only_thought(self) -> bool:
        """Whether the answer ended, by itself or by its length, before anything but a thought was said."""
        return not self.text and bool(self.reasoning) and self.finish_reason != "cancelled"

    def as_dict(self, *, reasoning: bool = True) -> dict[str, Any]:
        """What `--json` and batch records show of an answer, as plain values for JSON.

        Args:
            reasoning: whether the thought is among it.
        """
        fields: dict[str, Any] = {
            "text": self.text,
            **({"reasoning": self.reasoning} if reasoning else {}),
            "ids": list(self.ids),
            "finish_reason": self.finish_reason,
            "stop": self.stop,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "seed": self.seed,
            "stages": list(self.stages),
            "timings": dict(self.timings),
        }
        if self.reasoning_tokens:
            fields |= {"reasoning_tokens": self.reasoning_tokens, "reasoning_cut": self.reasoning_cut}
        if self.logprobs:
            fields["logprobs"] = [
                {"id": token, "logprob": entry.logprob, "top": [list(pair) for pair in entry.top]}
                for token, entry in zip(self.ids, self.logprobs, strict=False)
            ]
        return fields


class Assembler:
    """Builds the chunks and the completion of one request from its events.

    Args:
        id: the request id.
        tokenizer: for the text; None gives ids only.
        stops: stop strings, matched on the text across token edges.
        stop_ids: further ids that end the answer; they have no text.
        on_progress: see `OnProgress`.
        thought: where the model may reason first: whether the prompt has opened the thought; else None.
        budgeted: the request ends at the thinking budget, another one follows (`go_on`).

    Attributes:
        paused: the request ended at its budget, and the answer is not whole.
    """

    def __init__(
        self,
        id: str,
        tokenizer: Tokenizer | None,
        *,
        stops: Sequence[str] = (),
        stop_ids: Sequence[int] = (),
        on_progress: OnProgress | None = None,
        thought: bool | None = None,
        budgeted: bool = False,
    ) -> None:
        self.id = id
        self.stopped_by: str | None = None
        self.completion: Completion | None = None
        self.paused = False
        self._budgeted = budgeted
        self._cut = False
        self._earlier: Mapping[str, Value] = {}  # what the request that ended at its budget says of itself
        self._reasoning: list[str] = []
        self._reasoning_tokens = 0
        self._on_progress = on_progress
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._text: list[str] = []
        self._slots_used: set[str] = set()
        self._silent = frozenset(stop_ids)
        self._detokenizer = None
        self._stops = None
        self._split = None
        self._tags: Mapping[int, str] = {}
        if tokenizer is not None:
            from slotd.client.detokenizer import Detokenizer, StopStrings

            self._silent |= tokenizer.stop_ids
            self._detokenizer = Detokenizer(tokenizer)
            self._stops = StopStrings(stops)
            if thought is not None:
                from slotd.client.reasoning import CLOSE, OPEN, ReasoningSplit

                self._split = ReasoningSplit(opened=thought)
                self._tags = tokenizer.hidden_ids((OPEN, CLOSE))

    def feed(self, event: Event) -> Chunk | None:
        """The chunk that `event` gives, if any. After the request's `Done`, `completion` is set.

        Raises:
            RequestError: the request failed.
        """
        match event:
            case Tokens():
                return self._tokens(event)
            case Done():
                return self._done(event)
            case Prefill() if self._on_progress is not None:
                self._on_progress(event.at, event.of)
            case Restored():
                self._slots_used.add("restore")
            case SnapInline():
                self._slots_used.add("snapshot")
        return None

    def _tokens(self, event: Tokens) -> Chunk | None:
        self._ids.extend(event.ids)
        self._logprobs.extend(event.logprobs)
        if self.stopped_by is not None:
            return None
        thought, text = "", ""
        if self._detokenizer is not None:
            spoken = [id for id in event.ids if id not in self._silent]
            thought, answer = self._divide(spoken) if self._split else ("", self._detokenizer.add(spoken))
            text = self._visible(answer)
        return Chunk(text, event.ids, event.logprobs, thought)

    def _divide(self, ids: Sequence[int]) -> tuple[str, str]:
        """The text of these ids as (thought, answer)."""
        assert self._split is not None
        assert self._detokenizer is not None
        thought, answer = "", ""
        for id in ids:
            inside = self._split.inside
            if id in self._tags and not self._split.answering:  # its tokenizer shows nothing of it
                text = self._detokenizer.finish() + self._tags[id]
            else:
                text = self._detokenizer.add([id])
            parts = self._split.add(text)
            thought, answer = thought + parts[0], answer + parts[1]
            self._reasoning_tokens += inside
        self._reasoning.append(thought)
        return thought, answer

    def _visible(self, text: str) -> str:
        """The part of the pending text that can be shown; everything from a stop string on is dropped."""
        assert self._stops is not None
        visible, self.stopped_by = self._stops.add(text)
        self._text.append(visible)
        return visible

    def _tail(self) -> tuple[str, str]:
        """What was held back, now that nothing follows: of the thought, and of the answer."""
        if self._detokenizer is None or self.stopped_by is not None:
            return "", ""
        assert self._stops is not None
        thought, rest = "", self._detokenizer.finish()
        if self._split is not None:
            parts = self._split.add(rest), self._split.finish()
            thought, rest = parts[0][0] + parts[1][0], parts[0][1] + parts[1][1]
            self._reasoning.append(thought)
        tail = self._visible(rest)
        if self.stopped_by is None:
            rest = self._stops.finish()
            self.stopped_by = self._stops.stopped_by
            self._text.append(rest)
            tail += rest
        return thought, tail

    # ----- the thinking budget

    @property
    def ids(self) -> Sequence[int]:
        """The ids so far."""
        return self._ids

    @property
    def cut(self) -> bool:
        """Whether the thought was still open when its budget was used up."""
        return self._cut

    @property
    def seed(self) -> int | None:
        """The seed of the request that ended at its budget."""
        return _integer(self._earlier, "seed")

    def go_on(self) -> None:
        """The events that follow are those of the request behind the budget."""
        self.paused = False

    def end(self) -> None:
        """There is no room for that request: the context is full."""
        self.paused = False
        fields: dict[str, Value] = {"limit": "max_ctx", "epoch": _integer(self._earlier, "epoch") or 0}
        self._done(Done(id=self.id, status="length", fields=fields))

    def _pause(self, fields: Mapping[str, Value]) -> Chunk | None:
        self.paused, self._budgeted, self._earlier = True, False, fields
        if self._split is None or not self._split.inside:
            return None
        assert self._detokenizer is not None
        self._cut = True
        thought, _ = self._split.add(self._detokenizer.finish())
        thought += self._split.close()
        self._reasoning.append(thought)
        return Chunk("", reasoning=thought) if thought else None

    def _done(self, done: Done) -> Chunk | None:
        fields = done.fields
        if done.status == "err" and self.stopped_by is None:
            raise done_error(fields, self.id)
        if done.status == "cancelled" and "reason" in fields and self.stopped_by is None:
            raise RequestError(str(fields["reason"]), id=self.id)  # nobody asked for it: no whole answer
        at_budget = done.status == "length" and fields.get("limit", "n_gen") == "n_gen"
        if self._budgeted and at_budget and self.stopped_by is None:
            return self._pause(fields)
        thought, tail = self._tail()
        reason: FinishReason = "length"
        stop: str | int | None = None
        if self.stopped_by is not None:
            reason, stop = "stop", self.stopped_by
        elif done.status == "stop":
            reason, stop = "stop", _integer(fields, "stop")
        elif done.status == "cancelled":
            reason = "cancelled"
        first = self._earlier or fields
        prompt, reused = _integer(first, "prompt") or 0, _integer(first, "reused") or 0
        self.completion = Completion(
            text="".join(self._text),
            reasoning="".join(self._reasoning),
            reasoning_tokens=self._reasoning_tokens,
            reasoning_cut=self._cut,
            ids=tuple(self._ids),
            finish_reason=reason,
            stop=stop,
            limit=str(fields.get("limit", "n_gen")) if reason == "length" else None,
            prompt_tokens=prompt,
            cached_tokens=reused,
            seed=_integer(first, "seed"),
            logprobs=tuple(self._logprobs),
            timings=_add_times(self._earlier, fields),
            stages=self._stages(prompt, reused),
            epoch=_integer(fields, "epoch") or 0,
            id=self.id,
        )
        return Chunk(tail, reasoning=thought) if tail or thought else None

    def _stages(self, prompt: int, reused: int) -> tuple[str, ...]:
        happened = {
            "restore": "restore" in self._slots_used,
            "reuse": reused > 0 and "restore" not in self._slots_used,
            "prefill": prompt > reused,
            "snapshot": "snapshot" in self._slots_used,
            "decode": bool(self._ids),
        }
        return tuple(stage for stage, did in happened.items() if did)


def _integer(fields: Mapping[str, Value], name: str) -> int | None:
    value = fields.get(name)
    return value if isinstance(value, int) else None


def _add_times(*accounts: Mapping[str, Value]) -> dict[str, float]:
    """Seconds by stage, of all requests of an answer."""
    times: dict[str, float] = {}
    for account in accounts:
        for key, value in account.items():
            if key.endswith("_s") and isinstance(value, int | float):
                times[key] = times.get(key, 0.0) + float(value)
    return times
