import os
from pathlib import Path

import numpy as np
import pytest

from slotd.daemon.prompt_files import read_ids, write_ids
from slotd.protocol.errors import RequestError


def refused(path: Path | str, counted: bool = False) -> dict[str, object]:
    with pytest.raises(RequestError) as caught:
        read_ids(str(path), counted=counted)
    assert caught.value.code == "empty_prompt"
    return dict(caught.value.fields)


def test_raw_ids_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "p.bin"
    write_ids(str(path), [1, 2, 70000], counted=False)
    assert path.read_bytes() == np.asarray([1, 2, 70000], "<i4").tobytes()
    assert read_ids(str(path), counted=False).tolist() == [1, 2, 70000]


def test_counted_ids_round_trip_and_stop_at_the_count(tmp_path: Path) -> None:
    path = tmp_path / "p.bin"
    write_ids(str(path), [4, 5, 6], counted=True)
    with open(path, "ab") as file:
        file.write(b"more")
    assert read_ids(str(path), counted=True).tolist() == [4, 5, 6]


def test_trailing_bytes_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "p.bin"
    path.write_bytes(np.asarray([7, 8], "<i4").tobytes() + b"xyz")
    assert read_ids(str(path), counted=False).tolist() == [7, 8]


def test_what_is_not_a_prompt_is_refused_with_its_reason(tmp_path: Path) -> None:
    assert "No such file" in str(refused(tmp_path / "none")["reason"])
    assert refused(tmp_path)["reason"]
    (tmp_path / "empty").touch()
    assert refused(tmp_path / "empty")["reason"] == "no ids"
    (tmp_path / "short").write_bytes(b"abc")
    assert refused(tmp_path / "short")["reason"] == "no ids"
    assert refused("nul\0byte")["reason"]


def test_a_pipe_is_refused_and_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert refused(tmp_path / "pipe")["reason"] == "not a regular file"


def test_a_count_that_promises_too_much_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.bin"
    path.write_bytes(np.asarray([3, 1, 2], "<i4").tobytes())
    assert refused(path, counted=True)["reason"] == "the count says 3, the file holds 2"


def test_an_absurd_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.bin"
    with open(path, "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(RequestError, match="bad_args"):
        read_ids(str(path), counted=False)


def test_an_output_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="write_out"):
        write_ids(str(tmp_path / "no" / "dir.bin"), [1], counted=True)
