"""A server of OpenAI's API that answers as it is told, to test clients with."""

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Reply = Callable[["Asked"], Any]


@dataclass
class Asked:
    """A request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    number: int


@dataclass
class FakeOpenAI:
    """Listens on a port of this machine, in a thread of its own.

    reply: (status, headers, JSON value or bytes) for a request, or None for the normal answer: a token is a word, a
      stream has `max_tokens` words, the first after first_s and each other one step_s later, and in a chat the role
      at once; bytes are sent as they are. An exception hangs up.
    """

    first_s: float = 0.0
    step_s: float = 0.0
    has_usage: bool = True
    reply: Reply = lambda asked: None
    asked: list[Asked] = field(default_factory=list)
    max_running: int = 0
    num_connections: int = 0
    num_gone: int = 0

    def __enter__(self) -> "FakeOpenAI":
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._running = 0
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        async def stop() -> None:
            self._server.close()
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [asked.body for asked in self.asked if asked.path == path]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while await self._answer(reader, writer):
                await writer.drain()
        except ConnectionError:
            self.num_gone += 1
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether to go on with this connection."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
        except asyncio.IncompleteReadError:
            return False
        first, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        content = await reader.readexactly(int(headers.get("content-length", 0)))
        asked = Asked(*first.split()[:2], headers, json.loads(content or b"{}"), len(self.asked))
        self.asked.append(asked)
        try:
            reply = self.reply(asked)
        except Exception:
            return False
        if isinstance(reply, bytes):
            writer.write(reply)
            return False
        if reply is not None:
            status, more, value = reply
            _write(writer, status, value, more)
            return True
        self._running += 1
        self.max_running = max(self.max_running, self._running)
        try:
            await self._normal(asked, writer)
        finally:
            self._running -= 1
        return True

    async def _normal(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        body = asked.body
        if asked.path == "/v1/models":
            _write(writer, 200, {"data": [{"id": "fake", "max_model_len": 64}]})
            return
        is_chat = asked.path == "/v1/chat/completions"
        prompt = " ".join(m["content"] for m in body["messages"]) if is_chat else body["prompt"]
        num_prompt = len(prompt.split() if isinstance(prompt, str) else prompt) + 5 * is_chat
        count = body.get("max_tokens", 3)
        usage = {"prompt_tokens": num_prompt, "completion_tokens": count} if self.has_usage else None
        words = [f"w{number} " for number in range(count)]
        if not body.get("stream"):
            await asyncio.sleep(self.first_s + self.step_s * (count - 1))
            text = "".join(words)
            choice = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
            _write(writer, 200, {"choices": [choice | {"index": 0, "finish_reason": "length"}], "usage": usage})
            return
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        if is_chat:
            _write_event(writer, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
            await writer.drain()
        await asyncio.sleep(self.first_s)
        for number, word in enumerate(words):
            if number:
                await asyncio.sleep(self.step_s)
            choice = {"delta": {"content": word}} if is_chat else {"text": word}
            finish_reason = "length" if number == count - 1 else None
            _write_event(writer, {"choices": [choice | {"index": 0, "finish_reason": finish_reason}]})
            await writer.drain()
        if usage:
            _write_event(writer, {"choices": [], "usage": usage})
        _write_chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")


def _write(writer: asyncio.StreamWriter, status: int, value: Any, more: dict[str, str] | None = None) -> None:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    headers = "".join(f"{name}: {text}\r\n" for name, text in (more or {}).items())
    writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n{headers}\r\n".encode() + body)


def _write_event(writer: asyncio.StreamWriter, value: Any) -> None:
    _write_chunk(writer, b"data: " + json.dumps(value).encode() + b"\n\n")


def _write_chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))
