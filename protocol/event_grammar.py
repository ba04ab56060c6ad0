"""The table of event lines: what a daemon prints on stdout, one form for each class of `messages`.

An event line is ``lead word ... key=value ...``: `lead` are its fixed first words. The JSON events
(`JSON_KINDS`) are their tag and one JSON object, and have no form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slotd.protocol import messages
from slotd.protocol.grammar import Field

_INT64_MAX = 2**63 - 1

JSON_KINDS = ("hello", "status", "props", "stored")

#: Order and names of the time account at the end of a `[done]` line, in seconds.
ACCOUNT = (
    "wall_s", "queue_s", "load_s", "compress_s", "restore_s", "prefill_s", "decode_s", "draft_s", "verify_s",
    "sample_s", "snapshot_s", "recover_s", "emit_s", "other_s",
)  # fmt: skip


def _count(name: str) -> Field:
    return Field(name, "int", high=_INT64_MAX)


def _numbers(name: str) -> Field:
    return Field(name, "numbers", high=_INT64_MAX)


@dataclass(frozen=True, slots=True)
class EventForm:
    """How one class of events is written.

    Attributes:
        message: the class.
        lead: fixed words at the start.
        words: values by position, behind the lead.
        fields: key=value fields with a type; further ones are ignored, so that later daemons may append.
        open: further key=value fields are kept, in the message's `fields`.
        first: the line is of this form only when its first field has this name.
        id_first: the id stands before the fields instead of at the end.
        constants: attributes that the lead already says.
    """

    message: type[messages.Event]
    lead: str
    fields: tuple[Field, ...] = ()
    words: tuple[Field, ...] = ()
    open: bool = False
    first: str = ""
    id_first: bool = False
    constants: Mapping[str, Any] = field(default_factory=dict)


_SLOT = _count("slot")
_CUR_POS = _count("cur_pos")
_TIER = (Field("tier", "name", required=False), Field("hash", "hash", required=False))
_HASH = Field("hash", "hash")
_SPAN = Field("kv", "span", high=_INT64_MAX, attributes=("kv_start", "kv_end"))

EVENTS: tuple[EventForm, ...] = (
    EventForm(messages.Ready, "[daemon] ready"),
    EventForm(messages.SnapTaken, "[snap]", (_SLOT, _CUR_POS, *_TIER), first="slot"),
    EventForm(messages.SnapThin, "[snap] thin", (_SLOT, _SPAN)),
    EventForm(messages.SnapInline, "[snap] inline", (_SLOT, _CUR_POS, *_TIER)),
    EventForm(messages.SnapInlineFailed, "[snap] inline-failed", (_SLOT, Field("reason", "text"))),
    EventForm(messages.Restored, "[snap] restored", (_SLOT, _CUR_POS)),
    EventForm(messages.ChainRestored, "[snap] chain restored",
              (Field("thick", "int", low=-1), _count("thins"), _CUR_POS)),
    EventForm(messages.SnapLoaded, "[snap] loaded", (_SLOT, _CUR_POS, _HASH)),
    EventForm(messages.SnapDropped, "[snap] dropped", (_HASH,)),
    EventForm(messages.SnapFreed, "[snap] freed", (_SLOT,)),
    EventForm(messages.SlotList, "[snap]", (_numbers("slots"),), first="slots"),
    EventForm(messages.AllCleared, "[snap] all-cleared",
              (_count("epoch"), _numbers("freed"), _numbers("kept"), _count("bytes"))),
    EventForm(messages.Parked, "[park] target released", constants={"what": "target"}),
    EventForm(messages.Parked, "[park] draft released", constants={"what": "draft"}),
    EventForm(messages.Unparked, "[unpark] target restored", constants={"what": "target"}),
    EventForm(messages.Unparked, "[unpark] draft restored", constants={"what": "draft"}),
    EventForm(messages.DrafterFreed, "[drafter] freed"),
    EventForm(messages.Ok, "ok", open=True),
    EventForm(messages.Error, "err", words=(Field("code", "name"),), open=True),
    EventForm(messages.Prefill, "[prefill]",
              (Field("at", "progress", high=_INT64_MAX, attributes=("at", "of")),), id_first=True),
    EventForm(messages.Tokens, "[tok]",
              (_count("at"), Field("ids", "numbers"), Field("logprobs", "logprobs", required=False)),
              id_first=True),
    EventForm(messages.Cancelled, "[cancel]", (Field("found", "flag"),), id_first=True),
    EventForm(messages.Done, "[done]", (Field("status", "name"),), open=True, id_first=True),
)  # fmt: skip
