"""Metrics: names that dashboards know, counts that are right, one answer for all workers."""

import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import psutil
import pytest
from metric_samples import samples
from prometheus_client.parser import text_string_to_metric_families
from serve_process import ServeProcess

from jaxllm import EngineInfo, EngineStats, SamplingParams
from jaxllm.scheduler import RequestStatus, SchedulerStats, StepTokens
from jaxllm.server.observability.finished_request import FinishedRequest
from jaxllm.server.observability.metrics import Metrics
from jaxllm.server.observability.recent import NUM_SECONDS, Recent, summarize
from jaxllm.server.server_config import ServerConfig

# What is queried by the panels of the Grafana dashboards in vLLM's repository (examples/observability: grafana.json of
# prometheus_grafana, performance_statistics.json and query_statistics.json of dashboards; read in 2026), with the
# labels that they select or group by.
QUERIED_BY_DASHBOARDS = {
    "e2e_request_latency_seconds_bucket": {"model_name", "le"},
    "e2e_request_latency_seconds_sum": {"model_name"},
    "e2e_request_latency_seconds_count": {"model_name"},
    "generation_tokens_total": {"model_name"},
    "inter_token_latency_seconds_bucket": {"model_name", "le"},
    "inter_token_latency_seconds_sum": {"model_name"},
    "inter_token_latency_seconds_count": {"model_name"},
    "iteration_tokens_total_count": set(),
    "kv_cache_usage_perc": {"model_name"},
    "num_requests_running": {"model_name"},
    "num_requests_waiting": {"model_name"},
    "prompt_tokens_total": {"model_name"},
    "request_decode_time_seconds_sum": {"model_name"},
    "request_generation_tokens_bucket": {"model_name", "le"},
    "request_max_num_generation_tokens_sum": {"model_name"},
    "request_prefill_time_seconds_sum": {"model_name"},
    "request_prompt_tokens_bucket": {"model_name", "le"},
    "request_queue_time_seconds_sum": {"model_name"},
    "request_success_total": {"model_name", "finished_reason"},
    "time_to_first_token_seconds_bucket": {"model_name", "le"},
    "time_to_first_token_seconds_sum": {"model_name"},
    "time_to_first_token_seconds_count": {"model_name"},
}

# What dashboards of earlier versions query, the endpoint picker of the Gateway API Inference Extension reads by
# default, and vLLM's own documentation lists for an engine without LoRA, drafts and connectors.
KNOWN_TO_DASHBOARDS = [
    *QUERIED_BY_DASHBOARDS,
    "num_requests_waiting_by_reason",
    "cache_config_info",
    "gpu_cache_usage_perc",
    "iteration_tokens_total_bucket",
    "iteration_tokens_total_sum",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "time_per_output_token_seconds_bucket",
    "request_time_per_output_token_seconds_bucket",
    "request_inference_time_seconds_sum",
    "request_params_max_tokens_sum",
    "request_params_n_sum",
]


def fake_llm(**stats) -> SimpleNamespace:
    info = EngineInfo(
        model="m",
        max_model_len=1024,
        vocab_size=256,
        page_size=16,
        num_pages=101,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        dtype="bfloat16",
        kv_cache_dtype="bfloat16",
        platform="cpu",
        device="cpu",
        eos_token_ids=(2,),
        enable_prefix_caching=True,
    )
    return SimpleNamespace(
        info=info, state="ready", heartbeat_age_s=0.1, num_restarts=0, stats=EngineStats(**{"time": 1.0} | stats)
    )


def finished(**facts) -> FinishedRequest:
    return FinishedRequest(
        **{
            "request_id": "r",
            "endpoint": "/v1/completions",
            "params": SamplingParams(max_tokens=8),
            "num_prompt_tokens": 30,
            "output_lens": [5],
            "finish_reasons": ["stop"],
            "received": 100.0,
            "first_scheduled": 100.25,
            "first_token": 101.0,
            "finished": 103.0,
        }
        | facts
    )


@pytest.mark.parametrize("prefix", ["jaxllm:", "vllm:"])
def test_dashboards_and_gateways_find_every_metric_by_its_name(prefix):
    metrics = Metrics(fake_llm(), ServerConfig(metrics_prefix=prefix))
    families = list(text_string_to_metric_families(metrics.text().decode()))
    names = {sample.name for family in families for sample in family.samples}
    assert {prefix + name for name in KNOWN_TO_DASHBOARDS} <= names
    assert all(name.startswith(prefix) for name in names)
    labels = [sample.labels for family in families for sample in family.samples]
    assert all((found["model_name"], found["engine"]) == ("m", "0") for found in labels)
    assert all(family.documentation for family in families)


def test_the_documentation_has_every_metric_and_no_other():
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| `(\w+)` \| (\w+) \|", page, flags=re.MULTILINE)
    llm = fake_llm(memory_bytes=1, memory_limit_bytes=2)
    text = Metrics(llm, ServerConfig(metrics_prefix="")).text().decode()
    assert sorted(documented) == sorted(re.findall(r"^# TYPE (\w+) (\w+)$", text, flags=re.MULTILINE))


def test_the_cache_is_described_as_gateways_read_it():
    found = samples(Metrics(fake_llm(), ServerConfig()).text())
    (labels,) = [key[1:] for key in found if key[0] == "jaxllm:cache_config_info"]
    assert {"block_size=16", "num_gpu_blocks=100"} <= set(labels)


def test_what_the_engine_says_is_shown_by_state_reason_and_kind():
    llm = fake_llm(
        num_padded_tokens=11,
        num_steps=6,
        host_s=0.5,
        scheduler=SchedulerStats(
            num_requests={
                RequestStatus.WAITING: 3,
                RequestStatus.PREEMPTED: 1,
                RequestStatus.PREFILLING: 2,
                RequestStatus.DECODING: 5,
                RequestStatus.FINISHED_STOP: 9,
            },
            num_used_pages=25,
            num_free_pages=75,
            num_cached_pages=30,
            num_host_pages=7,
            num_loaded_pages=4,
            num_stalls=2,
            num_prefix_query_tokens=640,
            num_prefix_hit_tokens=320,
            steps_by_size=(3, 0, 1, 0, 0, 2),
            all_steps=StepTokens(num_decode_tokens=40, num_prefill_tokens=60),
        ),
    )
    found = samples(Metrics(llm, ServerConfig(metrics_prefix="")).text())
    assert found["num_requests_running",] == 7
    assert found["num_requests_waiting",] == 4
    assert found["num_requests_waiting_by_reason", "reason=capacity"] == 3
    assert found["num_requests_waiting_by_reason", "reason=preempted"] == 1
    assert found["num_requests_by_state", "state=decoding"] == 5
    assert ("num_requests_by_state", "state=finished_stop") not in found
    assert found["kv_cache_usage_perc",] == 0.25
    assert found["kv_cache_pages", "state=free", "tier=device"] == 45
    assert found["kv_cache_pages", "state=cached", "tier=host"] == 7
    assert found["page_moves_total", "move=loaded"] == 4
    assert found["page_stalls_total",] == 2
    assert found["prefix_cache_hits_total",] / found["prefix_cache_queries_total",] == 0.5
    assert found["batch_tokens_total", "kind=prefill"] == 60
    assert found["batch_tokens_total", "kind=padding"] == 11
    assert found["steps_total",] == 6
    assert found["iteration_tokens_total_bucket", "le=1.0"] == 3
    assert found["iteration_tokens_total_bucket", "le=4.0"] == found["iteration_tokens_total_bucket", "le=16.0"] == 4
    assert found["iteration_tokens_total_count",] == found["iteration_tokens_total_bucket", "le=+Inf"] == 6
    assert found["iteration_tokens_total_sum",] == 100
    assert found["compilations_after_start_total",] == 0


def test_an_engine_that_restarts_is_shown_as_down():
    llm = fake_llm()
    llm.state = "restarting"
    assert samples(Metrics(llm, ServerConfig(metrics_prefix="")).text())["engine_up",] == 0


def test_a_request_is_counted_once_in_each_histogram():
    llm = fake_llm()
    metrics = Metrics(llm, ServerConfig(metrics_prefix=""))
    llm.on_tokens(5)
    metrics.first_token(1.0, 30)
    metrics.tokens(1, None)
    metrics.tokens(4, 2.0)  # four tokens half a second apart, which came together
    metrics.request_finished(finished(num_cached_tokens=16))
    metrics.request_finished(
        finished(finish_reasons=["abort"], output_lens=[0], first_scheduled=None, first_token=None)
    )
    metrics.refused(429)
    found = samples(metrics.text())
    assert found["prompt_tokens_total",] == 30
    assert found["prompt_tokens_cached_total",] == 16
    assert found["generation_tokens_total",] == 5
    assert found["request_success_total", "finished_reason=stop"] == 1
    assert found["request_success_total", "finished_reason=abort"] == 1
    assert found["request_success_total", "finished_reason=error"] == 0
    assert found["request_refusals_total", "status=429"] == 1
    for name in ("inter_token_latency_seconds", "time_per_output_token_seconds"):
        assert found[f"{name}_count",] == 4
        assert found[f"{name}_sum",] == pytest.approx(2.0)
        assert found[f"{name}_bucket", "le=0.4"] == 0
        assert found[f"{name}_bucket", "le=0.5"] == 4
    for name, value in (
        ("time_to_first_token_seconds", 1.0),
        ("request_queue_time_seconds", 0.25),
        ("request_prefill_time_seconds", 0.75),
        ("request_decode_time_seconds", 2.0),
        ("request_inference_time_seconds", 2.75),
        ("request_time_per_output_token_seconds", 0.5),
    ):
        assert found[f"{name}_count",] == 1, name  # the aborted one got nowhere
        assert found[f"{name}_sum",] == pytest.approx(value), name
    assert found["e2e_request_latency_seconds_count",] == 2
    assert found["e2e_request_latency_seconds_bucket", "le=+Inf"] == 2


def test_choices_are_counted_each_by_their_end():
    metrics = Metrics(fake_llm(), ServerConfig(metrics_prefix=""))
    metrics.request_finished(finished(finish_reasons=["stop", "length"], output_lens=[3, 8]))
    found = samples(metrics.text())
    assert found["request_success_total", "finished_reason=stop"] == 1
    assert found["request_success_total", "finished_reason=length"] == 1
    assert found["request_generation_tokens_sum",] == 11
    assert found["request_max_num_generation_tokens_sum",] == 8
    assert found["e2e_request_latency_seconds_count",] == 1


def test_any_worker_answers_for_all_also_for_one_that_died(tmp_path):
    script = """
        import sys
        from pathlib import Path
        from types import SimpleNamespace
        from jaxllm.server.observability.metrics import Metrics
        from jaxllm.server.server_config import ServerConfig

        llm = SimpleNamespace(info=SimpleNamespace(model="m"))
        metrics = Metrics(llm, ServerConfig(), Path(sys.argv[1]))
        llm.on_tokens(7)
        metrics.first_token(0.5, 100)
        metrics.tokens(7, 0.7)
    """
    llm = fake_llm()
    here = Metrics(llm, ServerConfig(metrics_prefix=""), tmp_path)
    llm.on_tokens(3)
    for _ in range(2):
        subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], check=True, timeout=60)
    also_here = Metrics(fake_llm(), ServerConfig(metrics_prefix=""), tmp_path)  # the same process: the same file
    for metrics in (here, also_here):
        found = samples(metrics.text())
        assert found["generation_tokens_total",] == 17
        assert found["prompt_tokens_total",] == 200
        assert found["inter_token_latency_seconds_count",] == 14
        assert metrics.recent()["ttft_ms"]["count"] == 2


def recent_of(*adds, now: float = 1000.5) -> dict:
    """The summary at `now` after these (time, kind, seconds)."""
    vector = memoryview(bytearray(8 * Recent.SIZE)).cast("d")
    recent = Recent(vector)
    for when, kind, seconds in adds:
        recent.add(when, kind, seconds)
    return dict(summarize(np.array(vector)[None], now))


def test_percentiles_of_the_last_minute_are_right_within_a_bucket():
    random = np.random.default_rng(0)
    latencies = random.lognormal(np.log(0.08), 1.0, 5000)
    times = random.uniform(941.0, 1000.4, len(latencies))
    order = np.argsort(times)
    summary = recent_of(*((times[i], "ttft", latencies[i]) for i in order))["ttft_ms"]
    assert summary["count"] == 5000
    for percent in (50, 90, 99):
        assert summary[f"p{percent}"] == pytest.approx(1e3 * np.percentile(latencies, percent), rel=0.06)


def test_what_is_older_than_a_minute_is_forgotten():
    old, fresh = 1000.5 - NUM_SECONDS - 1, 1000.5
    assert recent_of((old, "itl", 5.0), (fresh, "itl", 0.01))["itl_ms"]["count"] == 1
    assert recent_of((old, "itl", 5.0))["itl_ms"] == {"count": 0, "p50": None, "p90": None, "p99": None}


def test_slots_are_used_again_and_again():
    summary = recent_of(*((float(second), "tpot", 0.02) for second in range(700, 1001)))
    assert summary["tpot_ms"]["count"] == NUM_SECONDS


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 5e3])
def test_latencies_beyond_the_buckets_are_counted(seconds):
    assert recent_of((1000.0, "ttft", seconds))["ttft_ms"]["count"] == 1


def test_the_rate_is_that_of_whole_seconds():
    vector = memoryview(bytearray(8 * Recent.SIZE)).cast("d")
    recent = Recent(vector)
    for tenth in range(9900, 10005):
        recent.add_tokens(tenth / 10, 3, None)
    assert summarize(np.array(vector)[None], 1000.45)["tokens_per_s"] == pytest.approx(30.0)


def scrape(server) -> dict[tuple[str, ...], float]:
    answer = httpx.get(f"{server.url}/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return samples(answer.content)


def test_a_live_server_counts_what_its_clients_are_told(start_stub):
    server = start_stub(metrics_prefix="vllm:")
    prompt_tokens = completion_tokens = 0
    for number in range(5):
        body = {"model": "stub", "prompt": "abc" * (number + 1), "max_tokens": 4 + number}
        usage = httpx.post(f"{server.url}/v1/completions", json=body).raise_for_status().json()["usage"]
        prompt_tokens += usage["prompt_tokens"]
        completion_tokens += usage["completion_tokens"]
    assert httpx.post(f"{server.url}/v1/completions", json={"model": "none", "prompt": "a"}).status_code == 404
    server.wait_until_idle()
    found = scrape(server)
    assert found["vllm:prompt_tokens_total",] == prompt_tokens
    assert found["vllm:generation_tokens_total",] == completion_tokens
    assert found["vllm:request_success_total", "finished_reason=length"] == 5
    assert found["vllm:time_to_first_token_seconds_count",] == 5
    assert found["vllm:e2e_request_latency_seconds_count",] == 5
    assert found["vllm:request_queue_time_seconds_count",] == 5
    # Tokens that come together with a first one have no time of their own.
    assert 5 <= found["vllm:inter_token_latency_seconds_count",] <= completion_tokens - 5
    assert found["vllm:request_refusals_total", "status=404"] == 1
    assert found["vllm:iteration_tokens_total_count",] == found["vllm:steps_total",]
    assert found["vllm:iteration_tokens_total_sum",] >= prompt_tokens
    assert_that_every_panel_has_data(server)
    assert found["vllm:num_requests_running",] == found["vllm:num_requests_waiting",] == 0
    assert found["vllm:kv_cache_usage_perc",] == 0
    assert found["vllm:steps_total",] >= 4
    assert found["vllm:engine_up",] == 1


def assert_that_every_panel_has_data(server) -> None:
    """Of vLLM's dashboards, once there were requests."""
    families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
    found = [sample for family in families for sample in family.samples]
    for name, labels in QUERIED_BY_DASHBOARDS.items():
        series = [sample for sample in found if sample.name == f"vllm:{name}" and labels <= sample.labels.keys()]
        assert series, name
        assert all(sample.labels.get("model_name", "stub") == "stub" for sample in series)
        is_now = name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        assert is_now or any(sample.value > 0 for sample in series), name


def test_each_of_several_workers_answers_for_all(stub_folder, tmp_path):
    server = ServeProcess(tmp_path, stub_folder, api_workers=2)
    connections = httpx.Limits(max_keepalive_connections=0)  # one for each request: they spread over the workers
    try:
        with httpx.Client(base_url=server.url, limits=connections) as client:
            body = {"model": "stub", "prompt": "abc", "max_tokens": 5}
            for _ in range(24):
                client.post("/v1/completions", json=body).raise_for_status()
            for _ in range(6):
                found = samples(client.get("/metrics").content)
                assert found["jaxllm:generation_tokens_total",] == 24 * 5
                assert found["jaxllm:request_success_total", "finished_reason=length"] == 24
                assert client.get("/live").json()["recent"]["ttft_ms"]["count"] == 24
        files = [path for process in server.processes for path in _mapped_counts(process)]
        assert len(files) == len(set(files)) >= 2
    finally:
        server.close()


def _mapped_counts(process: psutil.Process) -> list[str]:
    return [mapping.path for mapping in process.memory_maps() if "/counts-" in mapping.path]


def test_live_answers_with_the_engine_and_the_last_minute(start_stub):
    server = start_stub()
    with httpx.Client(base_url=server.url) as client:
        body = {"model": "stub", "prompt": "!slow ab", "max_tokens": 1000, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as stream:
            next(stream.iter_lines())
            during: dict = {}
            server.wait_for(lambda: during.update(client.get("/live").json()) or during["num_running"] == 1)
        server.wait_until_idle()
        after = client.get("/live").json()
    assert during["model"] == "stub"
    assert during["state"] == "ready"
    assert during["problem"] is None
    assert during["requests"]["decoding"] + during["requests"]["prefilling"] == 1
    assert during["pages"]["device"]["used"] > 0
    assert during["recent"]["ttft_ms"]["count"] == 1
    assert during["recent"]["ttft_ms"]["p50"] > 0
    assert after["num_running"] == after["num_waiting"] == 0
    assert after["finished"]["abort"] == 1
    assert after["pages"]["device"]["used"] == 0
    assert after["steps"]["count"] >= during["steps"]["count"]


def test_live_asks_for_a_key_where_the_server_does(start_stub, tmp_path):
    keys = tmp_path / "keys.json"
    keys.write_text('{"keys": [{"key": "sk-secret-123", "name": "alice"}]}')
    server = start_stub(api_keys_file=str(keys))
    assert httpx.get(f"{server.url}/live").status_code == 401
    assert httpx.get(f"{server.url}/live", headers={"Authorization": "Bearer sk-secret-123"}).status_code == 200


def test_counting_tokens_is_cheap_enough_for_every_delta():
    """20,000 tokens a second may take a tenth of a core at most, on a machine that is busy with other things too."""
    metrics = Metrics(fake_llm(), ServerConfig())
    best = min(_time_of_tokens(metrics, 2000) for _ in range(20))
    assert best < 5e-6, f"{best * 1e6:.2f} µs"


def _time_of_tokens(metrics: Metrics, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        metrics.tokens(1, 0.013)
    return (time.perf_counter() - start) / count
