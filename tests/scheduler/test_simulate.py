"""A trace gives the times that arithmetic gives, and settings show what they do."""

import json
import subprocess
import sys

import pytest

from jaxllm.scheduler import SchedulerConfig
from jaxllm.scheduler.simulate import CostModel, TraceError, example_trace, main, read_trace, simulate

SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 100, "max_model_len": 1000, "page_size": 10, "num_pages": 200}
COST = CostModel(fixed_ms=10.0, us_per_token=100.0, ns_per_kv_token=0.0)


def test_times_are_those_of_the_cost_model():
    """A prompt of 150 in two chunks, at 20 and 15 ms, then 3 tokens at 10.1 ms, beginning at its arrival."""
    trace = [{"arrival_s": 2.0, "prompt_tokens": 150, "output_tokens": 4}]
    outcome = simulate(trace, SchedulerConfig(**SIZES), COST)
    assert outcome.ttft_s == {"0": pytest.approx(0.035)}
    assert outcome.tpot_s == {"0": pytest.approx(0.0101)}
    assert outcome.seconds == pytest.approx(2.0 + 0.035 + 0.0303)
    assert (outcome.num_finished, outcome.num_output_tokens) == (1, 4)
    assert outcome.goodput(0.04, 0.02) == pytest.approx(1 / outcome.seconds)
    assert outcome.goodput(0.03, 0.02) == 0.0


def test_prefixes_are_shared_and_the_rest_is_not():
    trace = [
        {"arrival_s": 0.1 * index, "prompt_tokens": 95, "output_tokens": 1, "prefix": "system", "prefix_tokens": 60}
        for index in range(3)
    ]
    stats = simulate(trace, SchedulerConfig(**SIZES), COST).stats
    assert (stats.num_prefix_query_tokens, stats.num_prefix_hit_tokens) == (3 * 95, 2 * 60)


def test_refusals_and_timeouts_are_counted():
    trace = [
        {"arrival_s": 0.0, "prompt_tokens": 5000, "output_tokens": 4},
        {"arrival_s": 0.0, "prompt_tokens": 300, "output_tokens": 500, "timeout_s": 0.5},
        {"arrival_s": 0.0, "prompt_tokens": 10, "output_tokens": 5, "tenant": "b", "priority": -1},
    ]
    outcome = simulate(trace, SchedulerConfig(**SIZES), COST)
    assert (outcome.num_refused, outcome.num_timeouts, outcome.num_finished) == (1, 1, 1)


def test_those_for_whom_there_is_no_room_are_counted_as_refused():
    trace = [{"arrival_s": 0.0, "prompt_tokens": 10, "output_tokens": 5}] * 3
    outcome = simulate(trace, SchedulerConfig(**SIZES, max_queued_requests=2), COST)
    assert (outcome.num_refused, outcome.num_finished) == (1, 2)


def test_fair_sharing_shows_in_the_example_trace():
    trace, slowest = list(example_trace()), {}
    for policy in ("fcfs", "fair"):
        config = SchedulerConfig(
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            max_model_len=8192,
            page_size=64,
            num_pages=1500,
            scheduling_policy=policy,
        )
        outcome = simulate(trace, config, CostModel())
        chat = sorted(ttft for name, ttft in outcome.ttft_s.items() if outcome.tenants[name] == "chat")
        slowest[policy] = chat[int(0.9 * len(chat))]
    assert slowest["fair"] < 0.1 * slowest["fcfs"]


def test_the_command_prints_a_column_for_each_policy(tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, example_trace(10))))
    assert main([str(path), "--policy", "fcfs", "fair"]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[0].split() == ["fcfs", "fair"]
    for label in ("TTFT p50", "TPOT p50", "goodput", "preemptions", "prefix hits", "of tenant chat", "10 of 10"):
        assert label in printed


def test_the_command_runs_without_jax():
    program = (
        "import sys; from jaxllm.scheduler.simulate import main; main(['--example'])\n"
        "print('jax' in sys.modules, file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert len(read_trace(result.stdout.splitlines())) == 400
    assert result.stderr.strip() == "False"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", r"line 2 is \[1\]; it must be an object"),
        ('{"arrival": 1}', "line 2 has 'arrival'; the names are arrival_s"),
        ('{"arrival_s": "1"}', "line 2: arrival_s is '1', of a wrong type"),
        ('{"arrival_s": 1, "prompt_tokens": true}', "line 2: prompt_tokens is True"),
        ('{"arrival_s": 1, "prompt_tokens": 2}', "line 2 has no output_tokens"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(line, message):
    good = '{"arrival_s": 1, "prompt_tokens": 2, "output_tokens": 3}'
    with pytest.raises(TraceError, match=message):
        read_trace([good, line])
