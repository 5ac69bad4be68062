"""A completion that is read in a thread, while the test does something to the server."""

import json
import threading
import time

import httpx


class Streaming:
    """lines: what came so far, without "data: " and the empty ones. error: what broke the connection, if it did."""

    def __init__(self, url: str, max_tokens: int, prompt: str = "!slow") -> None:
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.lines: list[str] = []
        self.status: int | None = None
        self.error: Exception | None = None
        body = {"model": "stub", "prompt": prompt, "max_tokens": max_tokens, "stream": True}
        self._thread = threading.Thread(target=self._read, args=(url, body))
        self._thread.start()

    def wait(self, timeout_s: float = 20.0) -> None:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive()

    def wait_until_begun(self) -> None:
        deadline = time.monotonic() + 20
        while not self.lines:
            assert self.error is None, self.error
            assert time.monotonic() < deadline
            time.sleep(0.01)

    @property
    def chunks(self) -> list[dict]:
        return [json.loads(line) for line in self.lines if line != "[DONE]"]

    def assert_complete(self) -> None:
        """The stub repeats the prompt."""
        self.wait()
        assert self.error is None, self.error
        assert self.lines[-1] == "[DONE]", self.lines[-1]
        choices = [choice for chunk in self.chunks for choice in chunk["choices"]]
        assert choices[-1]["finish_reason"] == "length"
        assert "".join(choice["text"] for choice in choices) == (self.prompt * self.max_tokens)[: self.max_tokens]

    def _read(self, url: str, body: dict) -> None:
        try:
            with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as answer:
                self.status = answer.status_code
                for line in answer.iter_lines():
                    if line:
                        self.lines.append(line.removeprefix("data: "))
        except Exception as error:
            self.error = error
