import asyncio
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from fake_openai import Asked, FakeOpenAI

import jaxllm.server.commands.bench.load as load
from jaxllm import ConfigError
from jaxllm.server.commands.bench import cli as bench_cli
from jaxllm.server.commands.bench import workload
from jaxllm.server.commands.bench.load import ClientCost, Measured, Sample
from jaxllm.server.commands.bench.prompts import PROBES, WORDS, TextPrompts, TokenIdPrompts
from jaxllm.server.commands.bench.result import Result
from jaxllm.server.commands.bench.workload import BenchRequest
from jaxllm.server.commands.cli import main
from jaxllm.server.commands.client.http_client import HttpClient
from jaxllm.server.commands.client.http_response import TransportError
from jaxllm.server.commands.client.sse_reader import SseReader


@pytest.fixture
def bench(tmp_path, capsys):
    """(server, …options) -> (exit code, first result as in the JSON, stdout, stderr)"""

    def run(server: FakeOpenAI, *options: str):
        path = tmp_path / "result.json"
        code = main(["bench", "serve", "--url", server.url, "-o", str(path), *options])
        out, err = capsys.readouterr()
        report = json.loads(path.read_text()) if path.exists() else {"results": [{}]}
        run.report = report
        return code, report["results"][0], out, err

    return run


def sample(**facts) -> Sample:
    return Sample(BenchRequest(prompt_len=8, output_len=3), **{"due_s": 0.0} | facts)


# What is measured


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_latencies_are_those_of_the_server(bench, endpoint):
    with FakeOpenAI(first_s=0.1, step_s=0.02) as server:
        options = ("--endpoint", endpoint, "--concurrency", "2", "--num-requests", "6", "--output-len", "11")
        code, result, out, _ = bench(server, *options)
    assert code == 0
    assert result["num_ok"] == result["num_requests"] == 6
    assert result["num_output_tokens"] == 66
    assert 100 <= result["ttft_ms"]["p50"] < 200
    assert 20 <= result["tpot_ms"]["p50"] < 60
    assert 20 <= result["itl_ms"]["p50"] < 60
    assert 300 <= result["e2e_ms"]["p50"] < 800
    assert result["seconds"] >= 3 * 0.3
    assert result["output_tokens_per_s"] == pytest.approx(66 / result["seconds"])
    assert "TTFT p50 p90 p95 p99, ms" in out


def measure(server: FakeOpenAI, requests, *, kind: str = "completions", concurrency=None, timeout_s=30.0) -> Measured:
    from jaxllm.server.commands.bench.endpoint import Endpoint

    async def run() -> Measured:
        client = HttpClient(server.url)
        try:
            way = load.Load(Endpoint(kind, "fake"), {"": client}, timeout_s)
            prompts = [f"prompt {number}" for number in range(len(requests))]
            return await way.measure(requests, prompts, concurrency=concurrency, progress=load.Progress())
        finally:
            await client.close()

    return asyncio.run(run())


def test_the_role_of_a_chat_is_not_its_first_token():
    with FakeOpenAI(first_s=0.1) as server:
        (each,) = measure(server, [BenchRequest(prompt_len=8, output_len=4)], kind="chat").samples
    assert each.ttft_s >= 0.1
    assert len(each.gaps_s) == 3


def test_an_open_loop_sends_when_requests_are_due_however_slow_the_server_is():
    requests = [BenchRequest(prompt_len=2, output_len=10, due_s=0.05 * number) for number in range(8)]
    with FakeOpenAI(step_s=0.05) as server:
        measured = measure(server, requests)
    assert server.max_running == 8
    for number, each in enumerate(measured.samples):
        assert each.due_s == pytest.approx(0.05 * number)
        assert each.due_s <= each.sent_s < each.due_s + 0.1


def test_times_count_from_when_a_request_was_due():
    """So that a client or a server that falls behind shows it (no coordinated omission)."""
    each = sample(due_s=1.0, sent_s=1.4, first_s=1.5, last_s=1.7, end_s=1.75, num_output_tokens=3)
    assert each.ttft_s == pytest.approx(0.5)
    assert each.tpot_s == pytest.approx(0.1)
    assert each.e2e_s == pytest.approx(0.75)


def test_a_closed_loop_keeps_so_many_at_once():
    requests = [BenchRequest(prompt_len=2, output_len=3)] * 20
    with FakeOpenAI(step_s=0.005) as server:
        measured = measure(server, requests, concurrency=4)
    assert server.max_running == 4
    assert server.num_connections == 4
    assert len(measured.samples) == 20


def test_goodput_counts_what_keeps_all_bounds():
    fast = sample(first_s=0.1, last_s=0.3, end_s=0.3, num_output_tokens=3, gaps_s=[0.1, 0.1])
    late = sample(first_s=0.6, last_s=0.8, end_s=0.8, num_output_tokens=3, gaps_s=[0.1, 0.1])
    slow = sample(first_s=0.1, last_s=1.9, end_s=2.0, num_output_tokens=3, gaps_s=[0.9, 0.9])
    failed = sample(error="no", end_s=0.1)
    measured = Measured(0.0, 2.0, [fast, late, slow, failed], ClientCost(0.1, []))

    def good(**bounds: float) -> int:
        return Result("x", measured, bounds).num_good()

    assert good(ttft=500) == 2
    assert good(tpot=200) == 2
    assert good(ttft=500, tpot=200) == 1
    assert good(itl=100.001) == 2
    assert good(e2e=800) == 2
    figures = Result("x", measured, {"ttft": 500, "tpot": 200}).as_dict()
    assert figures["goodput"] == {"slo_ms": {"ttft": 500, "tpot": 200}, "requests_per_s": 0.5, "share": 0.25}


def test_percentiles_and_throughput():
    samples = [sample(due_s=0.0, first_s=t / 1e3, last_s=1.0, end_s=4.0, num_output_tokens=10) for t in range(1, 102)]
    figures = Result("x", Measured(0.0, 4.0, samples, ClientCost(0.1, [])), {}).as_dict()
    assert figures["ttft_ms"] == {"mean": 51.0, "p50": 51.0, "p90": 91.0, "p95": 96.0, "p99": 100.0, "max": 101.0}
    assert figures["output_tokens_per_s"] == pytest.approx(1010 / 4)
    assert figures["requests_per_s"] == pytest.approx(101 / 4)
    assert figures["goodput"] is None


# What goes wrong


def test_failures_are_counted_by_their_reason_and_leave_the_figures_alone(bench):
    def reply(asked: Asked):
        return (503, {}, {"error": {"message": "queue full"}}) if asked.number % 2 and asked.number > 6 else None

    with FakeOpenAI(reply=reply) as server:
        code, result, out, err = bench(server, "--num-requests", "10", "--output-len", "4", "--concurrency", "1")
    assert code == 1
    assert result["num_ok"] == 5
    assert "5 requests failed: HTTP 503: queue full" in err
    assert "requests succeeded" in out
    assert sum(request["error"] is not None for request in result["requests"]) == 5


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (b'data: {"error": {"message": "the engine died"}}\n\ndata: [DONE]\n\n', "in the stream: the engine died"),
        (b"data: {nonsense\n\n", "an event that is not as OpenAI's"),
        (b"data: [DONE]\n\n", "the answer had no event with text in it"),
    ],
)
def test_a_stream_that_is_no_answer_is_a_failure(stream, message):
    answer = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n" + stream
    with FakeOpenAI(reply=lambda asked: answer) as server:
        (each,) = measure(server, [BenchRequest(prompt_len=2, output_len=3)], concurrency=1).samples
    assert message in each.error


def test_a_server_that_hangs_up_or_never_ends_is_a_failure():
    half = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\ndata:"
    with FakeOpenAI(reply=lambda asked: half) as server:
        (each,) = measure(server, [BenchRequest(prompt_len=2, output_len=3)], concurrency=1).samples
    assert "has hung up in the middle of an answer" in each.error
    with FakeOpenAI(step_s=0.05) as server:
        (each,) = measure(server, [BenchRequest(prompt_len=2, output_len=50)], concurrency=1, timeout_s=0.2).samples
    assert each.error == "no end after 0.2 s"


def test_a_warm_up_that_fails_ends_the_benchmark(bench):
    reply = lambda asked: (400, {}, {"error": {"message": "no such field ignore_eos"}}) if asked.number > 2 else None  # noqa: E731
    with FakeOpenAI(reply=reply) as server:
        code, _, _, err = bench(server, "--num-requests", "3")
    assert code == 2
    assert "error: a request of the warm-up failed: HTTP 400: no such field ignore_eos" in err


def test_a_slow_client_says_so():
    busy = Measured(0.0, 1.0, [sample(end_s=1.0)], ClientCost(0.95, [0.001]))
    late = Measured(0.0, 1.0, [sample(end_s=1.0)], ClientCost(0.1, [0.05]))
    fine = Measured(0.0, 1.0, [sample(end_s=1.0)], ClientCost(0.1, [0.001]))
    assert "it used 95% of a core" in Result("x", busy, {}).warnings()[0]
    assert "up to 50 ms late" in Result("x", late, {}).warnings()[0]
    assert not any("bottleneck" in warning for warning in Result("x", fine, {}).warnings())
    small = Measured(0.0, 9.0, [sample(first_s=8.0, end_s=9.0)], ClientCost(0.1, [0.05]))
    assert not any("bottleneck" in warning for warning in Result("x", small, {}).warnings())


def test_the_lag_of_a_blocked_event_loop_is_seen():
    import time

    async def run() -> list[float]:
        lags: list[float] = []
        watch = asyncio.create_task(load._watch_lag(lags))
        await asyncio.sleep(0.05)
        time.sleep(0.2)
        await asyncio.sleep(0.05)
        watch.cancel()
        return lags

    assert max(asyncio.run(run())) > 0.15


def test_a_server_without_usage_is_counted_by_events_and_that_is_said(bench):
    with FakeOpenAI(has_usage=False) as server:
        code, _, _, err = bench(server, "--num-requests", "3")
        assert code == 2
        assert "no usage.prompt_tokens" in err
        code, result, _, err = bench(server, "--num-requests", "3", "--token-ids", "--output-len", "7")
    assert code == 0
    assert result["num_output_tokens"] == 21
    assert "output tokens are counted as events" in err


def test_answers_that_end_early_are_told():
    short = sample(first_s=0.1, end_s=0.2, has_usage=True, num_output_tokens=2)
    warnings = Result("x", Measured(0.0, 1.0, [short], ClientCost(0.1, [])), {}).warnings()
    assert warnings == ["1 answers ended before their wanted length"]


# What is asked for


def test_prompts_have_the_wanted_number_of_tokens_as_the_server_counts(bench):
    with FakeOpenAI() as server:
        for endpoint in ("completions", "chat"):
            options = ("--endpoint", endpoint, "--input-len", "100", "--num-requests", "4", "--output-len", "2")
            _, result, _, _ = bench(server, *options)
            assert [request["prompt_tokens"] for request in result["requests"]] == [100] * 4


def test_prompts_are_calibrated_where_a_word_is_not_a_token():
    prompts = TextPrompts.calibrated(8 * 2 + 11, len(WORDS) * 2 + 11)
    assert prompts == TextPrompts(2.0, 11.0)
    text = prompts.make(BenchRequest(prompt_len=211, output_len=1), 0, 0)
    assert len(text.split()) == 100
    assert len(PROBES[1].split()) == len(WORDS) == len(set(WORDS))


@pytest.mark.parametrize("prompts", [TextPrompts(1.0, 0.0), TokenIdPrompts(30_000)])
def test_prompts_begin_alike_only_where_they_share_a_prefix(prompts):
    shared = [BenchRequest(prompt_len=60, output_len=1, prefix=p, prefix_len=40) for p in "aab"]
    made = [prompts.make(request, 0, index) for index, request in enumerate(shared)]
    one, other, third = (prompt.split() if isinstance(prompt, str) else prompt for prompt in made)
    assert len(one) == len(other) == len(third) == 60
    assert one[:40] == other[:40]
    assert one[40:45] != other[40:45]
    assert one[:5] != third[:5]
    again = prompts.make(shared[0], 1, 0)
    assert (again.split() if isinstance(again, str) else again)[:5] != one[:5]  # another seed, as of another load


def test_token_ids_stay_in_the_vocabulary():
    ids = TokenIdPrompts(256).make(BenchRequest(prompt_len=500, output_len=1), 0, 0)
    assert len(ids) == 500
    assert 128 <= min(ids) <= max(ids) < 256


def test_arrivals_have_the_wanted_rate_and_shape():
    requests = [BenchRequest(prompt_len=1, output_len=1)] * 20_000

    def gaps(burstiness: float) -> np.ndarray:
        due = [r.due_s for r in workload.arriving(requests, 50.0, burstiness, np.random.default_rng(0))]
        assert due[0] == 0.0
        return np.diff(due)

    for burstiness in (0.25, 1.0, 4.0):
        found = gaps(burstiness)
        assert found.mean() == pytest.approx(1 / 50, rel=0.05)
        assert found.std() / found.mean() == pytest.approx(burstiness**-0.5, rel=0.05)
    assert {r.due_s for r in workload.arriving(requests, float("inf"), 1.0, np.random.default_rng(0))} == {0.0}


def test_sharegpt_lengths_have_the_mean_of_the_data():
    requests = workload.sharegpt_requests(50_000, np.random.default_rng(0))
    prompt_lens, output_lens = (np.array([getattr(r, f"{n}_len") for r in requests]) for n in ("prompt", "output"))
    assert prompt_lens.mean() == pytest.approx(110, rel=0.05)
    assert output_lens.mean() == pytest.approx(300, rel=0.05)
    assert prompt_lens.min() >= 4
    assert prompt_lens.max() <= 1024
    assert np.median(output_lens) == pytest.approx(266, rel=0.03)


def test_random_lengths_stay_within_their_spread():
    requests = workload.random_requests(1000, 100, 10, 0.5, np.random.default_rng(0))
    assert {50, 150} <= {r.prompt_len for r in requests} <= set(range(50, 151))
    assert {r.output_len for r in requests} == set(range(5, 16))
    assert {r.prompt_len for r in workload.random_requests(9, 100, 10, 0.0, np.random.default_rng(0))} == {100}


def test_a_recorded_trace_is_played(bench, tmp_path):
    lines = [
        {"arrival_s": 5.0, "prompt_tokens": 30, "output_tokens": 2, "tenant": "chat", "priority": -1, "timeout_s": 9},
        {"arrival_s": 5.4, "prompt_tokens": 20, "output_tokens": 3, "prefix": "p", "prefix_tokens": 10},
        {"arrival_s": 5.2, "prompt_tokens": 20, "output_tokens": 4, "prefix": "p", "prefix_tokens": 10},
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with FakeOpenAI() as server:
        options = ("--workload", "trace", "--trace", str(tmp_path / "trace.jsonl"), "--speed", "2", "--warmup", "0")
        code, result, out, _ = bench(server, *options, "--api-key", "k0", "--tenant-key", "chat=k1")
    assert code == 0
    assert [request["due_s"] for request in result["requests"]] == pytest.approx([0.0, 0.1, 0.2])
    assert [request["output_tokens"] for request in result["requests"]] == [2, 4, 3]
    assert [request["prompt_tokens"] for request in result["requests"]] == [30, 20, 20]
    first, second, third = [asked for asked in server.asked if asked.path == "/v1/completions"][-3:]
    assert (first.headers["authorization"], second.headers["authorization"]) == ("Bearer k1", "Bearer k0")
    assert (first.headers["x-priority"], first.headers["x-timeout-s"]) == ("-1", "9")
    assert "x-priority" not in second.headers
    assert second.body["prompt"].split()[:10] == third.body["prompt"].split()[:10]
    assert "TTFT of tenant chat" in out
    assert "k1" not in json.dumps(bench.report)


def test_tenants_that_the_server_cannot_tell_apart_are_told(bench, tmp_path, capsys):
    lines = [{"arrival_s": 0, "prompt_tokens": 9, "output_tokens": 1, "tenant": tenant} for tenant in "ab"]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = ("--workload", "trace", "--trace", str(tmp_path / "trace.jsonl"))
    with FakeOpenAI() as server:
        _, _, _, err = bench(server, *options, "--tenant-key", "a=k")
        assert "these tenants of the trace are one: b (see --tenant-key)" in err
        with pytest.raises(SystemExit):
            bench(server, *options, "--tenant-key", "c=k")
    assert "--tenant-key has c; the trace has 'a', 'b'" in capsys.readouterr().err


def test_a_trace_that_cannot_be_read_names_the_line(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"arrival_s": 0}\n')
    with pytest.raises(ConfigError, match="line 1 has no prompt_tokens"):
        workload.trace_requests(tmp_path / "t.jsonl", 1.0)
    with pytest.raises(ConfigError, match="cannot be read"):
        workload.trace_requests(tmp_path / "none.jsonl", 1.0)


def test_bodies_are_openais(bench):
    with FakeOpenAI() as server:
        bench(server, "--num-requests", "1", "--warmup", "0", "--token-ids", "--input-len", "9", "--output-len", "3")
        bench(
            server, "--num-requests", "1", "--warmup", "0", "--endpoint", "chat", "--no-ignore-eos", "--output-len", "3"
        )
        bench(server, "--num-requests", "1", "--warmup", "0", "--extra-body", '{"temperature": 0.5, "top_p": 0.9}')
    ids, *_, extra = server.bodies("/v1/completions")
    assert len(ids.pop("prompt")) == 9
    assert ids == {
        "model": "fake",
        "max_tokens": 3,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    assert (extra["temperature"], extra["top_p"]) == (0.5, 0.9)
    chat = server.bodies("/v1/chat/completions")[-1]
    assert "ignore_eos" not in chat
    assert [message["role"] for message in chat["messages"]] == ["user"]


def test_several_loads_are_columns_and_lines_of_one_picture(bench, tmp_path):
    chart = tmp_path / "chart.png"
    with FakeOpenAI(step_s=0.002) as server:
        options = ("--concurrency", "1", "4", "--num-requests", "8", "--output-len", "5", "--chart", str(chart))
        code, _, out, _ = bench(server, *options, "--goodput", "ttft=1000", "e2e=1000")
    assert code == 0
    assert "1 at once" in out
    assert "4 at once" in out
    assert [result["label"] for result in bench.report["results"]] == ["1 at once", "4 at once"]
    assert chart.read_bytes().startswith(b"\x89PNG")
    from matplotlib.image import imread

    assert len(np.unique(imread(chart)[..., :3].reshape(-1, 3), axis=0)) > 50  # something is drawn
    prompts = [body["prompt"] for body in server.bodies("/v1/completions")]
    assert len(set(prompts)) == len(prompts)  # no prompt twice: the cache of prefixes would answer


def test_a_chart_without_matplotlib_is_refused_before_anything_runs(bench, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with FakeOpenAI() as server:
        code, _, _, err = bench(server, "--chart", str(tmp_path / "c.png"))
    assert code == 2
    assert "--chart needs matplotlib, which is not installed: pip install matplotlib" in err
    assert not server.asked


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--concurrency", "2", "--request-rate", "1"], "not allowed with"),
        (["--concurrency", "0"], "'0' is not an integer of at least 1"),
        (["--request-rate", "-1"], "'-1' is not a number above 0"),
        (["--burstiness", "2"], "--burstiness belongs to --request-rate"),
        (["--workload", "sharegpt", "--input-len", "5"], "--input-len does not belong to --workload sharegpt"),
        (["--prefix-len", "5"], "--prefix-len does not belong to --workload random"),
        (["--workload", "trace"], "--workload trace needs --trace FILE"),
        (["--token-ids", "--endpoint", "chat"], "--token-ids needs --endpoint completions"),
        (["--vocab-size", "5"], "--vocab-size belongs to --token-ids"),
        (["--goodput", "tfft=5"], "'tfft=5' is not NAME=MILLISECONDS"),
        (["--extra-body", "[1]"], "is not a JSON object"),
        (["--extra-body", '{"n": 2}'], "--extra-body may not have n"),
        (["--tenant-key", "a=b"], "--tenant-key belongs to --workload trace"),
        (["--warmup", "-1"], "--warmup is -1"),
        (["-o", "/nowhere/x.json"], "--output is /nowhere/x.json, and there is no folder /nowhere"),
        (["--chart", "/nowhere/x.png"], "--chart is /nowhere/x.png, and there is no folder /nowhere"),
        (["--num-request", "5"], "unknown option --num-request; did you mean --num-requests?"),
    ],
)
def test_a_mistaken_command_line_is_refused(options, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "serve", "--url", "http://127.0.0.1:9", *options])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_a_wrong_url_and_a_missing_server_are_told(capsys):
    assert main(["bench", "serve", "--url", "localhost:8000"]) == 2
    assert "it must be http://HOST:PORT or https://HOST:PORT" in capsys.readouterr().err
    assert main(["bench", "serve", "--url", "http://127.0.0.1:9"]) == 2
    assert "http://127.0.0.1:9 cannot be reached" in capsys.readouterr().err


def test_help_needs_neither_numpy_nor_an_http_client():
    program = (
        "import sys; from jaxllm.server.commands.cli import main\n"
        "try: main(['bench', 'serve', '--help'])\n"
        "except SystemExit: print(*{'jax', 'numpy', 'httptools', 'matplotlib'} & set(sys.modules), sep='', end='!')"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert bench_cli.EXAMPLES.split()[-1] in result.stdout


@pytest.mark.parametrize("option", ["--output", "--chart"])
def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(option, tmp_path, capsys):
    with FakeOpenAI() as server:
        assert main(["bench", "serve", "--url", server.url, option, str(tmp_path)]) == 2
        assert not server.asked
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("cannot be written: Is a directory")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is full is Linux's")
def test_figures_that_cannot_be_shown_are_in_the_file_and_the_other_way_round(tmp_path, capfd, monkeypatch):
    options = ["--num-requests", "2", "--concurrency", "1", "--input-len", "8", "--output-len", "2"]
    with FakeOpenAI() as server, open("/dev/full", "w") as full:
        command = ["bench", "serve", "--url", server.url, *options, "-o"]
        assert main([*command, "/dev/full"]) == 2
        out, err = capfd.readouterr()
        assert "TTFT" in out
        assert "error: --output /dev/full cannot be written: [Errno 28] No space left on device" in err
        monkeypatch.setattr(sys, "stdout", full)
        assert main([*command, str(tmp_path / "result.json")]) == 2
    assert json.loads((tmp_path / "result.json").read_text())["results"]


# The HTTP client and the reader of events


def test_the_reader_of_events_is_invariant_to_how_the_body_is_cut():
    body = b'data: {"a": 1}\n\n: comment\n\nevent: x\r\ndata: one\r\ndata:two\r\n\r\ndata: [DONE]\n\n'
    expected = [b'{"a": 1}', b"one\ntwo", b"[DONE]"]
    for first in range(len(body) + 1):
        for second in range(first, len(body) + 1):
            reader = SseReader()
            pieces = (body[:first], body[first:second], body[second:])
            assert [data for piece in pieces for data in reader.feed(piece)] == expected, (first, second)


def exchange(server: FakeOpenAI, *paths: str, **options) -> list:
    async def run() -> list:
        client = HttpClient(server.url, **options)
        try:
            return [await client.request("POST", path, b"{}") for path in paths]
        finally:
            await client.close()

    return asyncio.run(run())


def test_a_connection_is_used_again_and_a_closed_one_replaced():
    def reply(asked: Asked):
        if asked.path == "/close":
            return b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"  # and closes, without saying so
        return 200, {}, {"number": asked.number}

    with FakeOpenAI(reply=reply) as server:
        answers = exchange(server, "/a", "/b", "/close", "/c")
    assert [answer.status for answer in answers] == [200] * 4
    assert json.loads(answers[1].body) == {"number": 1}
    assert server.num_connections == 2


def test_a_server_that_hangs_up_on_a_fresh_connection_is_an_error():
    def reply(asked: Asked):
        raise ConnectionError

    with FakeOpenAI(reply=reply) as server, pytest.raises(TransportError, match="has hung up"):
        exchange(server, "/a")
    assert len(server.asked) == 1  # not sent again


def test_what_is_not_http_is_an_error():
    reply = lambda asked: b"SSH-2.0 hello\r\n\r\n"  # noqa: E731
    with FakeOpenAI(reply=reply) as server, pytest.raises(TransportError, match="the answer is not HTTP"):
        exchange(server, "/a")


def test_a_url_may_end_with_v1_and_have_a_path():
    with FakeOpenAI(reply=lambda asked: (200, {}, {})) as server:
        server.url += "/proxy/v1/"
        exchange(server, "/v1/models", api_key="k")
    (asked,) = server.asked
    assert asked.path == "/proxy/v1/models"
    assert asked.headers["authorization"] == "Bearer k"


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://u:p@x", "http://x?y=1"])
def test_a_url_that_cannot_be_is_refused(url):
    with pytest.raises(ValueError, match="the URL is"):
        HttpClient(url)


def test_line_breaks_do_not_get_into_a_request():
    async def run() -> None:
        await HttpClient("http://127.0.0.1:9").request("GET", "/a", headers={"x": "1\r\nevil: 2"})

    with pytest.raises(ValueError, match="line break"):
        asyncio.run(run())


# Our server


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_our_server_gives_every_token_that_was_asked_for(stub_server, bench, endpoint):
    options = ("--endpoint", endpoint, "--input-len", "300", "--output-len", "12", "--num-requests", "20")
    code, result, _, err = bench(stub_server, *options, "--request-rate", "100")
    assert (code, "ended before" in err) == (0, False)
    assert result["num_output_tokens"] == 20 * 12
    assert result["num_prompt_tokens"] == pytest.approx(20 * 300, rel=0.1)  # its tokens are bytes
    assert result["ttft_ms"]["p50"] > 2  # a step
    assert result["tpot_ms"]["p50"] > 2


def test_our_server_finds_shared_prefixes_in_its_cache(stub_server, bench):
    options = ("--workload", "shared-prefix", "--num-prefixes", "2", "--prefix-len", "256", "--input-len", "32")
    _, result, _, _ = bench(stub_server, *options, "--num-requests", "20", "--token-ids", "--vocab-size", "250")
    assert result["num_prompt_tokens"] == 20 * 288
    assert result["num_cached_tokens"] >= 10 * 256
