"""The files of a batch: whatever is in a line, and whatever the disk does."""

import asyncio
import json
import os
import resource

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxllm import ConfigError
from jaxllm.server.commands.batch.batch_file import BadLineError, BatchInput, BatchOutput, custom_id_of
from jaxllm.server.commands.batch.runner import BatchRunner, _check_that_output_belongs
from jaxllm.server.commands.client.http_response import Response
from jaxllm.server.commands.terminal import OutputError

GOOD = b'{"custom_id": "good", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 1}}'
DEEP = b"[" * 200_000 + b"]" * 200_000
PARTS = [
    *(b'"', b"\\", b"\\ud800", b"\\udc00x", b"\\u0000", b"\x00", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xef\xbb\xbf"),
    *(b"{", b"}", b"[", b"]", b":", b",", b"null", b"true", b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b"-1", b"0.5"),
    *(b'"custom_id": "x",', b'"custom_id": 7,', b'"url": "/v1/\xc2\xa0",', b'"body": null,', b'"extra": 1,'),
    *(b"\r", b"\x0b", b"\x0c", b"\x85", b"\xe2\x80\xa8", b" ", b"x" * 100_000, DEEP),
]


class Echo:
    """A server that answers anything with what it was asked."""

    async def request(self, method, path, body=b"", headers=None):
        return Response(200, {}, body)


def run_batch(folder, content):
    """The lines of the output. Run again with the same input, nothing is left to do."""
    (folder / "in").write_bytes(content)
    (folder / "out").unlink(missing_ok=True)
    batch = BatchInput(folder / "in")
    num_lines = sum(1 for _ in batch.lines())
    output = BatchOutput(folder / "out")
    asyncio.run(BatchRunner(Echo(), batch, output, timeout_s=10.0).run(3))
    output.close()
    again = BatchOutput(folder / "out")
    assert (again.num_done, again.num_failed) == (num_lines, output.num_failed)
    _check_that_output_belongs(batch, again, num_lines)
    again.close()
    return [msgspec.json.decode(line) for line in (folder / "out").read_bytes().splitlines()]


@st.composite
def spoiled_lines(draw):
    """A good line, with parts put in and pieces cut out."""
    line = GOOD.replace(b"good", b"spoiled")
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(line)))
        end = draw(st.integers(start, min(len(line), start + 8)))
        line = line[:start] + draw(st.sampled_from(PARTS) | st.binary(max_size=4)) + line[end:]
    return line.replace(b"\n", b"")


@settings(max_examples=150, deadline=None)
@given(line=spoiled_lines())
@example(line=GOOD.replace(b"good", b"half a pair \\ud83d"))
@example(line=GOOD.replace(b'"a"', b'"half a pair \\ud83d"'))
@example(line=GOOD.replace(b'"a"', b'"\xed\xa0\xbd"'))
@example(line=GOOD.replace(b'"a"', DEEP))
@example(line=GOOD.replace(b'"a"', b"[" * 400 + b"]" * 400))
@example(line=GOOD.replace(b'"a"', b"9" * 5000))
@example(line=GOOD.replace(b'"a"', b"123456789012345678901234567890"))
@example(line=GOOD.replace(b"{", b'{"custom_id": 7, ', 1))
@example(line=GOOD)
def test_a_bad_line_fails_alone_whatever_is_bad_in_it(tmp_path_factory, line):
    folder = tmp_path_factory.getbasetemp()
    if not line.strip().removeprefix(b"\xef\xbb\xbf"):
        return
    first, found, last = run_batch(folder, b"\n".join([GOOD, line, GOOD.replace(b"good", b"last")]) + b"\n")
    assert (first["custom_id"], last["custom_id"]) == ("good", "last")
    assert first["response"]["status_code"] == last["response"]["status_code"] == 200
    assert found["custom_id"] == custom_id_of(line)
    assert (found["response"] is None) != (found["error"] is None)


def test_a_body_reaches_the_server_as_it_was_written(tmp_path):
    body = b'{"prompt": "\\u00e9 \xc3\xa9", "x": 123456789012345678, "y": 1.10}'
    (tmp_path / "in").write_bytes(GOOD.replace(b'{"prompt": "a", "max_tokens": 1}', body))
    batch = BatchInput(tmp_path / "in")
    (line,) = batch.lines()
    assert bytes(batch.parse(line).body) == body


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_a_byte_order_mark_spoils_nothing(tmp_path, end):
    lines = [GOOD, GOOD.replace(b"good", b"two"), GOOD.replace(b"good", b"three")]
    content = b"\xef\xbb\xbf" + lines[0] + end + b"\xef\xbb\xbf" + end + lines[1] + end + b"\xef\xbb\xbf" + lines[2]
    answers = run_batch(tmp_path, content)
    assert [answer["custom_id"] for answer in answers] == ["good", "two", "three"]
    assert all(answer["error"] is None for answer in answers)


def test_a_custom_id_that_json_cannot_hold_is_none():
    line = GOOD.replace(b"good", b"\\ud83d")
    assert custom_id_of(line) is None
    with pytest.raises(BadLineError, match="surrogate"):
        BatchInput(None).parse(line)


@pytest.mark.parametrize("body", [b"9" * 5000, DEEP, b'"\\ud800"', b"\xff", b"", b'{\n "a": [1,\n 2]}'])
def test_an_answer_is_one_line_whatever_a_server_says(tmp_path, body):
    output = BatchOutput(tmp_path / "out")
    output.write("a", Response(200, {}, body))
    output.close()
    (line,) = (tmp_path / "out").read_bytes().splitlines()
    assert json.loads(line)["response"]["body"] in (body.decode(errors="replace"), {"a": [1, 2]})


def test_a_file_that_was_deleted_is_told(tmp_path):
    output = BatchOutput(tmp_path / "out")
    os.unlink(tmp_path / "out")
    with pytest.raises(OutputError, match="out was deleted"):
        output.write("a", Response(200, {}, b"{}"))
    assert output.num_done == 0
    output.close()


@pytest.mark.parametrize("path", ["/dev/full", "/dev/null", "."])
def test_an_output_that_is_no_file_is_refused(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is no file"):
        BatchOutput(type(tmp_path)(path))


def test_answers_that_a_full_disk_has_no_room_for_are_made_when_it_has(tmp_path):
    lines = [GOOD.replace(b"good", str(number).encode()) for number in range(40)]
    (tmp_path / "in").write_bytes(b"\n".join(lines))
    batch, limit = BatchInput(tmp_path / "in"), resource.getrlimit(resource.RLIMIT_FSIZE)
    output = BatchOutput(tmp_path / "out")
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limit[1]))
    try:
        with pytest.raises(OutputError, match="out cannot be written: File too large"):
            asyncio.run(BatchRunner(Echo(), batch, output, timeout_s=10.0).run(3))
        with pytest.raises(OutputError):
            output.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    num_done = output.num_done
    assert 0 < num_done < 40
    batch, output = BatchInput(tmp_path / "in"), BatchOutput(tmp_path / "out")
    assert output.num_done == num_done
    asyncio.run(BatchRunner(Echo(), batch, output, timeout_s=10.0).run(3))
    output.close()
    answers = (tmp_path / "out").read_bytes().splitlines()
    assert [json.loads(line)["custom_id"] for line in answers] == [str(number) for number in range(40)]
