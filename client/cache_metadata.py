"""What the client's caches keep on disk: for each entry a file of ids and a file of facts about it.

    KEY.bin        the ids that the daemon holds for the entry, int32, little-endian
    KEY.meta.json  version 2: kind, key_hex, model, kv_k_type, kv_v_type, fa_window, max_ctx, salt,
                   cur_ids_len, raw_prompt_len, ids_hash, content, hits, last_used_ns

Files are written whole or not at all, readable by their owner only, since prompts are private. Nothing that
lies in the folder can make a load fail: what does not fit the schema, or this model, is passed over.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slotd.client.cache_entries import WIDTH, Identity, Kind

logger = logging.getLogger(__name__)

VERSION = 2

#: A file of facts is never larger; a larger one is none of ours.
MOST_META_BYTES = 1 << 16

#: Records of one folder that are kept; the oldest go when it is loaded.
MOST_RECORDS = 256

_HASH = re.compile(r"[0-9a-f]{32}")
_SUFFIX = ".meta.json"


@dataclass(frozen=True, slots=True)
class Record:
    """One entry on disk.

    Attributes:
        ids: what a slot holds for it.
        raw_length: of the prompt that it stands for, in tokens.
        content: hash of the daemon's file, "" when there is none.
        last_used_ns: nanoseconds since 1970.
    """

    kind: Kind
    key: str
    ids: bytes
    raw_length: int
    content: str = ""
    hits: int = 0
    last_used_ns: int = 0


class BadMetadata(ValueError):
    """A file is not what it should be; the text says which field and why."""


class MetadataFolder:
    """The folder of one client.

    Args:
        path: made when it is not there.
        identity: what records must be made for.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(self, path: Path, identity: Identity) -> None:
        self._path = path
        self._identity = identity
        path.mkdir(parents=True, exist_ok=True, mode=0o700)

    def load(self) -> list[Record]:
        """Every record that is usable, the one used least recently first. Never raises for a bad file."""
        records = []
        for name in self._names():
            try:
                records.append(self._read(name))
            except (OSError, BadMetadata, RecursionError) as error:
                logger.warning("%s is passed over: %s", self._path / name, error)
        records.sort(key=lambda record: record.last_used_ns)
        for record in records[:-MOST_RECORDS]:
            self.remove(record.key)
        return records[-MOST_RECORDS:]

    def _names(self) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self._path) if name.endswith(_SUFFIX))
        except OSError as error:
            logger.warning("%s cannot be read: %s", self._path, error)
            return []

    def _read(self, name: str) -> Record:
        data = parse_meta(_read_file(self._path / name, MOST_META_BYTES), self._identity)
        key = data["key_hex"]
        if name != key + _SUFFIX:
            raise BadMetadata(f"key_hex {key} does not belong into a file of this name")
        ids = _read_file(self._path / f"{key}.bin", data["cur_ids_len"] * WIDTH)
        if len(ids) != data["cur_ids_len"] * WIDTH:
            raise BadMetadata(f"{key}.bin has {len(ids)} bytes for {data['cur_ids_len']} ids")
        if ids_hash(ids) != data["ids_hash"]:
            raise BadMetadata(f"{key}.bin is not the file that was written")
        if data["kind"] == "prefix" and self._identity.key(ids) != key:
            raise BadMetadata("key_hex is not the key of these ids")
        used = data["last_used_ns"]
        return Record(data["kind"], key, ids, data["raw_prompt_len"], data["content"], data["hits"], used)

    def write(self, record: Record) -> int:
        """Keep a record, in place of an older one of its key; bytes of its ids.

        Raises:
            OSError: it cannot be written; an older one is still whole.
        """
        facts = {
            "version": VERSION,
            "kind": record.kind,
            "key_hex": record.key,
            **_facts(self._identity),
            "cur_ids_len": len(record.ids) // WIDTH,
            "raw_prompt_len": record.raw_length,
            "ids_hash": ids_hash(record.ids),
            "content": record.content,
            "hits": record.hits,
            "last_used_ns": record.last_used_ns,
        }
        self._replace(f"{record.key}.bin", record.ids)
        self._replace(record.key + _SUFFIX, json.dumps(facts).encode())
        return len(record.ids)

    def _replace(self, name: str, data: bytes) -> None:
        descriptor, temporary = tempfile.mkstemp(prefix=".slotd-", dir=self._path)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            os.replace(temporary, self._path / name)
        except BaseException:
            os.unlink(temporary)
            raise

    def remove(self, key: str) -> None:
        """Delete both files of an entry, the facts first. Never raises."""
        for name in (key + _SUFFIX, f"{key}.bin"):
            try:
                os.unlink(self._path / name)
            except FileNotFoundError:
                continue
            except OSError as error:
                logger.warning("%s stays: %s", self._path / name, error)


def ids_hash(ids: bytes) -> str:
    """Checksum of a file of ids."""
    return hashlib.blake2b(ids, digest_size=16).hexdigest()


def _read_file(path: Path, most: int) -> bytes:
    with open(path, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise BadMetadata(f"{path.name} is longer than {most} bytes")
    return data


def _facts(identity: Identity) -> dict[str, str | int]:
    return {
        "model": identity.model,
        "kv_k_type": identity.k_type,
        "kv_v_type": identity.v_type,
        "fa_window": identity.window,
        "max_ctx": identity.max_ctx,
        "salt": identity.salt,
    }


def parse_meta(raw: bytes, identity: Identity) -> dict[str, Any]:
    """The checked object of a file of facts. Raises BadMetadata, which names the field."""
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadMetadata(f"not JSON: {error}") from None
    if not isinstance(data, dict):
        raise BadMetadata("not an object")
    if type(data.get("version")) is not int or data["version"] != VERSION:
        raise BadMetadata(f"version is {data.get('version')!r}, not {VERSION}")
    if data.get("kind") not in ("prefix", "full"):
        raise BadMetadata(f"kind is {data.get('kind')!r}")
    for name in ("key_hex", "ids_hash"):
        _check_hash(name, data.get(name))
    if data.get("content") != "":
        _check_hash("content", data.get("content"))
    for name, wanted in _facts(identity).items():
        if type(data.get(name)) is not type(wanted) or data[name] != wanted:
            raise BadMetadata(f"{name} is {data.get(name)!r}, not {wanted!r}")
    for name, least in (("cur_ids_len", 1), ("raw_prompt_len", 1), ("hits", 0), ("last_used_ns", 0)):
        value = data.get(name)
        if type(value) is not int or not least <= value < 1 << 63:  # a bool is no number here
            raise BadMetadata(f"{name} is {value!r}")
    if data["cur_ids_len"] >= 1 << 31:
        raise BadMetadata(f"cur_ids_len is {data['cur_ids_len']}")
    return data


def _check_hash(name: str, value: object) -> None:
    if not isinstance(value, str) or not _HASH.fullmatch(value):
        raise BadMetadata(f"{name} is {value!r}, not 32 hexadecimal digits")
