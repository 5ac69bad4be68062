"""What comes from a terminal and goes to it, whatever its encoding is, and whoever has left it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_openai import Asked, FakeOpenAI

from jaxllm.server.commands.cli import main
from jaxllm.server.commands.client.sse_reader import SseReader
from jaxllm.server.commands.terminal import as_text

HELPERS = Path(__file__).parents[1]
ECHO = f"""
import sys
sys.path[:0] = [{str(HELPERS)!r}]
import jaxllm.llm
from fake_llm import FakeLLM
jaxllm.llm.LLM = FakeLLM
from jaxllm.server.commands.cli import main
sys.exit(main())
"""
NOT_UTF_8 = [
    {"PYTHONIOENCODING": "ascii"},
    {"PYTHONIOENCODING": "latin-1"},
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
]
PROMPT = "grün … 東京 🙂"


def command(*arguments, env=None, stdin=b"", **options):
    """The command line in a process of its own, with a model that answers in capitals."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    argv = [sys.executable, "-c", ECHO, *arguments]
    return subprocess.run(argv, env=os.environ | (env or {}), input=stdin, timeout=120, **options)


@pytest.mark.parametrize("env", NOT_UTF_8, ids=["ascii", "latin-1", "the C locale"])
def test_an_answer_is_shown_in_any_encoding(env):
    done = command("generate", "m", "-p", PROMPT, env=env)
    shown = done.stdout.decode("latin-1")
    assert done.returncode == 0, done.stderr
    assert shown.encode("latin-1").decode("unicode_escape").strip() == PROMPT.upper()
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("env", [{}, *NOT_UTF_8], ids=["UTF-8", "ascii", "latin-1", "the C locale"])
def test_a_chat_reads_and_shows_any_encoding(env):
    """A line of UTF-8 reaches the model in any locale; one that is not UTF-8 is refused, and the next is not."""

    def reply(asked: Asked):
        if asked.path != "/v1/chat/completions":
            return None
        question = asked.body["messages"][-1]["content"]
        event = json.dumps({"choices": [{"delta": {"content": question}, "finish_reason": "stop"}]})
        return 200, {"content-type": "text/event-stream"}, f"data: {event}\n\ndata: [DONE]\n\n".encode()

    with FakeOpenAI(reply=reply) as server:
        lines = b"\xef\xbb\xbf" + PROMPT.encode() + "\r\na\u2028b\x0c\x85c\n".encode() + b"\xff\nlast\n"
        done = command("chat", "--url", server.url, env=env, stdin=lines)
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr
    questions = [asked.body["messages"][-1]["content"] for asked in server.asked if "messages" in asked.body]
    if env.get("PYTHONIOENCODING") != "latin-1":
        assert questions == [PROMPT, "a\u2028b\x0c\x85c", "last"]
        assert b"error: this line is not UTF-8" in done.stderr
    assert questions[-1] == "last"
    assert done.stdout.endswith(b"last\n")


def test_an_argument_that_is_not_utf_8_is_refused_in_one_line():
    for option in (["-p", b"caf\xe9"], ["-p", "a", "--stop", b"\xff"]):
        done = command("generate", "m", *option)
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert b"is not UTF-8" in line


def test_a_key_that_no_header_can_have_is_refused_in_one_line(tmp_path, capsys):
    (tmp_path / "in").write_text("{}\n")
    for argv in (["chat"], ["run-batch", str(tmp_path / "in"), "-o", str(tmp_path / "out")], ["bench", "serve"]):
        assert main([*argv, "--url", "http://127.0.0.1:1", "--api-key", "schlüssel"]) == 2
        assert "the API key has characters that a header cannot have" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is full is Linux's")
def test_an_answer_that_cannot_be_written_is_one_line_and_code_2():
    with open("/dev/full", "wb") as full:
        done = command("generate", "m", "-p", "a", stdout=full)
        assert (done.returncode, done.stderr) == (2, b"error: stdout cannot be written: No space left on device\n")
        done = command("generate", "m", "-p", "a", stderr=full)  # nobody can read the figures
        assert (done.returncode, done.stdout) == (0, b"A\n")


def test_streams_that_were_closed_raise_nothing():
    def run(redirection):
        argv = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-c", ECHO, "generate", "m", "-p", "a"]
        return subprocess.run(argv, capture_output=True, timeout=120)

    without_stdout = run(">&-")
    assert without_stdout.returncode == 2
    assert without_stdout.stderr == b"error: stdout cannot be written: it is closed\n"
    without_stderr = run("2>&-")
    assert (without_stderr.returncode, without_stderr.stdout) == (0, b"A\n")
    without_stdin = run("<&-")
    assert (without_stdin.returncode, without_stdin.stdout) == (0, b"A\n")
    argv = ["sh", "-c", 'exec "$@" <&-', "sh", sys.executable, "-c", ECHO, "chat", "m"]
    assert subprocess.run(argv, capture_output=True, timeout=120).returncode == 0


def test_a_reader_that_leaves_ends_the_command_without_a_word():
    readable, writable = os.pipe()
    os.close(readable)
    try:
        done = command("generate", "m", "-p", "a", stdout=writable)
    finally:
        os.close(writable)
    assert (done.returncode, done.stderr) == (2, b"")


def test_prompts_of_a_file_end_at_lf_and_crlf_and_nowhere_else(fake_llm, monkeypatch, tmp_path):
    prompts = ["one", "a\u2028b\u2029c\x85d\x0ce\x0bf\x1cg\rh", "\xa0three\ufeff"]
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(prompts[:2]).encode() + b"\n" + prompts[2].encode())
    asked = []
    monkeypatch.setattr(fake_llm, "generate", lambda self, prompts, *args, **options: asked.extend(prompts) or [])
    assert main(["generate", "model", "--prompts-file", str(file)]) == 0
    assert asked == prompts


def test_text_that_the_locale_could_not_decode_is_utf_8():
    assert as_text("grün") == "grün"
    assert as_text("grün".encode().decode("ascii", "surrogateescape")) == "grün"
    for wrong in ("\udcff", "\ud83d"):
        with pytest.raises(UnicodeError):
            as_text(wrong)


def test_events_end_at_cr_lf_and_crlf_and_nowhere_else():
    data = "a\u2028b\x85c\x0bd\x0c".encode()
    for end in (b"\n", b"\r\n", b"\r"):
        body = b"\xef\xbb\xbf" + b"".join(b"data: " + data + end + b"data: 2" + end + end for _ in range(2))
        for cut in range(len(body) + 1):
            reader = SseReader()
            pieces = (body[:cut], body[cut:])
            assert [found for piece in pieces for found in reader.feed(piece)] == [data + b"\n2"] * 2
