"""The command `jaxllm run-batch`: a file of requests, and a file of answers.

The output is written in the order of the input, and is the only record of what is done: the same command, run again,
goes on where it ended.
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from jaxllm import ConfigError, EngineConfig, JaxLLMError
from jaxllm.server.commands.options import add_options, options_from
from jaxllm.server.commands.terminal import note
from jaxllm.server.server_config import ServerConfig

if TYPE_CHECKING:
    from jaxllm.server.commands.batch.batch_file import BatchInput, BatchOutput, BatchRequest
    from jaxllm.server.commands.client.http_response import Response

FIRST_WAIT_S, MAX_WAIT_S = 0.5, 30.0  # between tries, unless the server says when
GIVE_UP_S = 900.0
"""How long a server may be full, restarting or away."""

NO_FAULT_OF_THE_REQUEST = (429, 502, 503)
LINES_AHEAD = 16
"""So many times the concurrency, answers may wait in memory for an earlier one to be written first."""

SERVER_OPTIONS = ("served_model_name", "chat_template", "tool_call_parser", "reasoning_parser")
ABOUT = """\
Runs a file of requests in OpenAI's batch format, on a server (--url) or on an engine of its own (MODEL). A line of
INPUT is {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}; line n of OUTPUT is {"id":
..., "custom_id": ..., "response": {"status_code", "request_id", "body"}, "error": ...} for line n of INPUT. What OUTPUT
already has is not run again. The exit code is 1 if a line has failed, and 2 if the batch had to stop, as
on a full disk; the same command goes on from there."""


class Client(Protocol):
    """What answers the requests."""

    async def request(self, method: str, path: str, body: bytes = ..., headers: Any = ...) -> "Response": ...


def add_parser(commands: Any) -> None:
    """Adds `run-batch` to what `add_subparsers` returned."""
    about = "run a file of requests in OpenAI's batch format"
    parser = commands.add_parser("run-batch", help=about, description=ABOUT, allow_abbrev=False)
    _take_positionals_anywhere(parser)
    parser.add_argument("input", type=Path, metavar="INPUT", help="the requests, a JSON object in each line")
    parser.add_argument("model", nargs="?", metavar="MODEL", help="hub id, folder, .gguf file, or a demo model")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="OUTPUT", help="the answers")
    parser.add_argument("--url", metavar="URL", help="of a server, in place of MODEL")
    parser.add_argument("--api-key", default="", metavar="KEY", help="or the environment variable JAXLLM_API_KEY")
    at_once = "requests at once (default: 32 with --url, twice as many as the engine runs at once with MODEL)"
    parser.add_argument("--concurrency", type=int, metavar="N", help=at_once)
    parser.add_argument("--timeout-s", type=float, default=3600.0, metavar="X", help="of a request (default: 3600)")
    parser.add_argument("--debug", action="store_true", help="show where an error comes from")
    others = [field.name for field in fields(ServerConfig) if field.name not in SERVER_OPTIONS]
    add_options(parser, ServerConfig, title="options of the application (with MODEL)", leave_out=others)
    add_options(
        parser,
        EngineConfig,
        title="engine options (with MODEL)",
        leave_out=("model", "tenants", "default_tenant"),
    )
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Runs what is left of the batch. 1 if a line of the output is a failure."""
    own_options = options_from(args, EngineConfig) | options_from(args, ServerConfig)
    if (args.url is None) == (args.model is None):
        args.parser.error("name either --url URL or MODEL")
    if args.url and own_options:
        name = next(iter(own_options)).replace("_", "-")
        args.parser.error(f"--{name} is for an engine of this command; the one at --url has options of its own")
    if args.api_key and not args.url:
        args.parser.error("--api-key belongs to --url")
    if args.concurrency is not None and args.concurrency < 1:
        args.parser.error(f"--concurrency is {args.concurrency}; it must be 1 or more")
    if args.timeout_s <= 0:
        args.parser.error(f"--timeout-s is {args.timeout_s:g}; it must be above 0")

    from jaxllm.server.commands.batch.batch_file import BatchInput, BatchOutput, same_file
    from jaxllm.server.commands.client import http_client

    if same_file(args.input, args.output):
        args.parser.error(f"{args.input} is both INPUT and OUTPUT")
    batch = BatchInput(args.input)
    num_lines = sum(1 for _ in batch.lines())
    output = BatchOutput(args.output)
    num_before = output.num_done
    try:
        _check_that_output_belongs(batch, output, num_lines)
    except ConfigError:
        output.close()
        raise
    try:
        with contextlib.closing(output):
            if num_before < num_lines:
                http_client.run(_run(args, batch, output, num_lines))
    finally:
        was_done = f" ({num_before:,} of them before)" if num_before else ""
        note(f"{output.num_done:,} of {num_lines:,} done{was_done}, {output.num_failed:,} failed")
        if output.num_done < num_lines:
            note("the same command goes on from there")
    return int(output.num_failed > 0)


async def _run(args: argparse.Namespace, batch: "BatchInput", output: "BatchOutput", num_lines: int) -> int:
    from tqdm import tqdm

    async with _client(args) as (client, concurrency):
        bar = tqdm(
            total=num_lines, initial=output.num_done, unit="request", disable=None, file=sys.stderr, mininterval=0.5
        )
        with bar:
            runner = BatchRunner(client, batch, output, timeout_s=args.timeout_s, on_line=bar.update)
            await runner.run(args.concurrency or concurrency)
    return 0


class BatchRunner:
    """Sends the lines that have no answer yet, several at once, and writes the answers in order.

    A request that fails by itself is written as failed. What is no fault of the request (the server is full, is
    starting, or cannot be reached) is tried again, and stops the batch in the end, so that no line is given up for it.

    timeout_s: of a request.
    on_line: called for each line that is written.
    """

    def __init__(
        self,
        client: Client,
        batch: "BatchInput",
        output: "BatchOutput",
        *,
        timeout_s: float,
        on_line: Callable[[], object] = lambda: None,
    ) -> None:
        self._client, self._batch, self._output = client, batch, output
        self._timeout_s, self._on_line = timeout_s, on_line
        self._waits = False  # for a server that answers nobody; told once each time
        self._answers: dict[int, tuple[str | None, Response | Exception]] = {}  # that wait for an earlier one

    async def run(self, concurrency: int) -> None:
        """Raises JaxLLMError if the batch had to stop; everything before the first missing answer is written."""
        work = self._work()
        self._room = asyncio.Semaphore(LINES_AHEAD * concurrency)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(self._send_on(work))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    def _work(self) -> "Iterator[tuple[int, str | None, BatchRequest | Exception]]":
        """(line, custom_id, request or what is wrong with it) of each line that has no answer yet."""
        from jaxllm.server.commands.batch.batch_file import BadLineError

        num_before = self._output.num_done
        for number, line in enumerate(self._batch.lines()):
            try:
                request: BatchRequest | BadLineError = self._batch.parse(line)
            except BadLineError as error:
                request = error
            if number >= num_before:
                yield number, request.custom_id, request

    async def _send_on(self, work: "Iterator[tuple[int, str | None, BatchRequest | Exception]]") -> None:
        while True:
            await self._room.acquire()
            if (item := next(work, None)) is None:
                self._room.release()
                return
            number, custom_id, request = item
            answer = request if isinstance(request, Exception) else await self._answer(request)
            self._answers[number] = custom_id, answer
            while (waiting := self._answers.pop(self._output.num_done, None)) is not None:
                self._output.write(*waiting)
                self._on_line()
                self._room.release()

    async def _answer(self, request: "BatchRequest") -> "Response | Exception":
        """The answer, or why there is none for this request. Raises JaxLLMError: there is none for any."""
        from jaxllm.server.commands.client.http_response import TransportError

        body = bytes(request.body)
        first_failure: float | None = None
        for attempt in itertools.count():
            retry_after = ""
            try:
                async with asyncio.timeout(self._timeout_s):
                    response = await self._client.request("POST", request.url, body)
            except TimeoutError:
                return TimeoutError(f"no end after {self._timeout_s:g} s (--timeout-s)")
            except TransportError as error:
                problem = str(error)
            else:
                if response.status not in NO_FAULT_OF_THE_REQUEST:
                    self._waits = False
                    return response
                problem, retry_after = response.error_text, response.headers.get("retry-after", "")
            now = time.monotonic()
            first_failure = first_failure or now
            if now - first_failure >= GIVE_UP_S:
                message = f"stopped at {request.custom_id!r}, after {attempt + 1} tries in {now - first_failure:.0f} s"
                raise BatchStoppedError(f"{message}: {problem}")
            if not self._waits and attempt:
                self._waits = True
                note(f"waiting for the server: {problem}")
            wait_s = FIRST_WAIT_S * 2 ** min(attempt, 16)
            with contextlib.suppress(ValueError):  # It may also be a date.
                wait_s = max(0.0, float(retry_after))
            await asyncio.sleep(min(MAX_WAIT_S, wait_s) * random.uniform(1.0, 1.3))
        raise AssertionError


class BatchStoppedError(JaxLLMError):
    """The server answers no request."""


@contextlib.asynccontextmanager
async def _client(args: argparse.Namespace) -> AsyncIterator[tuple[Client, int]]:
    """What answers, and how many requests at once it is good for."""
    if args.url:
        from jaxllm.server.commands.client.http_client import HttpClient

        try:
            client = HttpClient(args.url, api_key=args.api_key or os.environ.get("JAXLLM_API_KEY", ""))
        except ValueError as error:
            raise ConfigError(str(error)) from error
        try:
            response = await client.request("GET", "/v1/models")
            if response.status in (401, 403):
                raise ConfigError(
                    f"{client.url} wants an API key, by --api-key or JAXLLM_API_KEY: {response.error_text}"
                )
            yield client, 32
        finally:
            await client.close()
        return

    from jaxllm import AsyncLLM
    from jaxllm.server.commands.client.app_client import AppClient
    from jaxllm.server.http.app import create_app

    config = EngineConfig(model=args.model, **options_from(args, EngineConfig))
    options = options_from(args, ServerConfig)
    app_config = ServerConfig(**options, ui=False, request_timeout_s=None, max_body_bytes=1 << 40)
    llm = await AsyncLLM.start(config)
    try:
        app = create_app(llm, app_config)
        try:
            yield AppClient(app), 2 * llm.info.max_num_seqs
        finally:
            app.state.server.close()
    finally:
        await llm.close()


def _check_that_output_belongs(batch: "BatchInput", output: "BatchOutput", num_lines: int) -> None:
    from jaxllm.server.commands.batch.batch_file import custom_id_of

    if output.num_done > num_lines:
        raise ConfigError(f"{output.path} has {output.num_done:,} answers, and the input {num_lines:,} requests")
    pairs = zip(output.custom_ids, batch.lines(), strict=False)
    for number, (custom_id, line) in enumerate(pairs, 1):
        if custom_id != custom_id_of(line):
            raise ConfigError(
                f"{output.path} belongs to another input: its line {number:,} answers {custom_id!r}, and line "
                f"{number:,} of the input is {custom_id_of(line)!r}. Name another file with -o, or remove it."
            )


def _take_positionals_anywhere(parser: Any) -> None:
    """Lets INPUT and MODEL stand apart, with options between them, which argparse does not do by itself."""
    plain = parser.parse_known_args

    def parse_known_args(args: Any = None, namespace: Any = None) -> Any:
        parser.parse_known_args = plain  # which the other one calls
        try:
            return parser.parse_known_intermixed_args(args, namespace)
        finally:
            parser.parse_known_args = parse_known_args

    parser.parse_known_args = parse_known_args
