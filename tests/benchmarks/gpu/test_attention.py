"""What benchmarks/gpu/attention.py says of a card, as far as one can tell without one: the same programs on tiny steps
on the CPU, its arithmetic against counting, and its verdicts on made-up figures."""

import json
import re
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Program
from gpu_compilation import compile_in_child

from benchmarks.gpu import attention as gpu_attention
from benchmarks.gpu import check as gpu_check
from benchmarks.gpu import jax_kernels as gpu_jax
from benchmarks.gpu import jobs as gpu_jobs
from benchmarks.gpu import machine as gpu_machine
from benchmarks.gpu import static as gpu_static
from benchmarks.gpu import timing as gpu_timing
from benchmarks.gpu.bars import BARS, Bar, Machine, Measured, describe, implausible, judge
from benchmarks.gpu.jobs import UnavailableError, run_jobs
from benchmarks.gpu.steps import BATCHES, CONTEXTS, HEADS, L2_BYTES, PROMPTS, Job, decode_jobs, prefill_jobs
from benchmarks.kernel_workload import Workload

FOLDER_OF_TESTS = Path(__file__).parent
MACHINE = Machine(copy_bytes_per_s=4e12, product_flops_per_s=800e12)
DECODE, PREFILL = (
    Job(
        step=Workload(
            num_seqs=num_seqs,
            q_len=q_len,
            kv_len=40,
            num_heads=4,
            num_kv_heads=2,
            head_dim=64,
            kv_dtype="bfloat16",
            page_size=16,
        ),
        num_calls=3,
        num_places=2,
        pages_per_seq=5,
        num_pages=2 * num_seqs * 3 + 1,
    )
    for num_seqs, q_len in ((3, 1), (1, 40))
)


# Steps, and where they lie.


@pytest.mark.parametrize(("num_seqs", "q_len", "kv_len"), [(3, 1, 7), (1, 6, 6), (2, 3, 5)])
def test_bytes_and_flops_are_those_that_are_counted(num_seqs: int, q_len: int, kv_len: int):
    step = replace(DECODE.step, num_seqs=num_seqs, q_len=q_len, kv_len=kv_len, head_dim=2)
    num_bytes = flops = 0
    for _ in range(num_seqs):
        num_bytes += sum(2 for _ in range(kv_len) for _ in ("key", "value") for _ in range(2) for _ in range(2))
        for query in range(q_len):
            for _ in range(kv_len - q_len + query + 1):  # The keys that it sees.
                for _ in range(step.num_heads):
                    flops += 2 * step.head_dim  # Of the score.
                    flops += 2 * step.head_dim  # Of the value's share in the output.
    assert (step.kv_bytes, step.flops) == (num_bytes, flops)


def test_rates_are_bytes_of_a_decode_and_flops_of_a_prompt_by_the_median():
    decode = Measured(step=DECODE.step, figures={"gpu": {"median_s": 2e-6}})
    prefill = Measured(step=PREFILL.step, figures={"gpu": {"median_s": 2e-6}})
    assert decode.rate("gpu") == DECODE.step.kv_bytes / 2e-6
    assert prefill.rate("gpu") == PREFILL.step.flops / 2e-6
    assert decode.share("gpu", MACHINE) == DECODE.step.kv_bytes / 2e-6 / 4e12
    assert prefill.share("gpu", MACHINE) == PREFILL.step.flops / 2e-6 / 800e12
    assert decode.rate("xla") is None


@pytest.mark.parametrize("heads", sorted(set(HEADS.values())))
def test_what_is_read_between_two_reads_of_a_byte_is_more_than_the_l2_cache(heads: tuple[int, int, int]):
    for job in decode_jobs(heads, BATCHES, CONTEXTS, 64):
        turn_bytes = job.num_places * job.step.kv_bytes
        assert turn_bytes >= 2.5 * L2_BYTES
        if job.step.kv_len >= 4096 and (job.step.num_seqs >= 32 or job.step.kv_len == 32_768):  # The bars'.
            assert turn_bytes >= 30 * L2_BYTES
        assert job.num_places <= job.num_calls  # Each place is one that calls come to.


def test_decodes_of_a_batch_share_one_program():
    jobs = list(decode_jobs((32, 8, 128), [8], CONTEXTS, 64))
    assert [job.step.kv_len for job in jobs] == list(CONTEXTS)
    assert len({(job.num_pages, job.pages_per_seq, job.num_calls) for job in jobs}) == 1


@pytest.mark.parametrize("job", [*decode_jobs((4, 2, 64), [1, 3], [40, 100], 16), *prefill_jobs((4, 2, 64), [40], 16)])
def test_no_page_is_in_two_places(job: Job):
    tables = gpu_jax.page_tables(job)
    assert len(tables) == job.num_places
    used = np.concatenate([table_SP[:, : job.step.pages_per_seq].ravel() for table_SP in tables])
    assert len(set(used)) == len(used)
    assert used.min() >= 1
    assert used.max() < job.num_pages
    assert not any(table_SP[:, job.step.pages_per_seq :].any() for table_SP in tables)
    assert not np.array_equal(used, np.sort(used))


def test_all_figures_of_the_issue_are_planned():
    args = gpu_attention.parse_args([])
    jobs = [job for heads in gpu_attention.shapes(args.models) for job in gpu_attention.plan(args, heads)]
    decodes = {(job.step.num_heads, job.step.num_seqs, job.step.kv_len) for job in jobs if job.is_decode}
    assert decodes == {(n, b, c) for n in (16, 32, 64) for b in (1, 8, 32, 128) for c in (1024, 4096, 32_768)}
    prompts = {(job.step.num_heads, job.step.q_len) for job in jobs if not job.is_decode}
    assert prompts == {(n, t) for n in (16, 32, 64) for t in PROMPTS}
    assert (min(PROMPTS), max(PROMPTS)) == (512, 16_384)


def test_quick_has_a_step_of_each_bar():
    args = gpu_attention.parse_args(["--quick"])
    steps = [job.step for heads in gpu_attention.shapes(args.models) for job in gpu_attention.plan(args, heads)]
    assert all(any(bar.applies(step) for step in steps) for bar in BARS)
    assert len(steps) == 6


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--models", "gpt-2"], "invalid choice: 'gpt-2'"),
        (["--systems", "tpu"], "invalid choice: 'tpu'"),
        (["--card", "t4"], "invalid choice: 't4'"),
        (["--batches", "0"], "0 must be at least 1"),
        (["--prompts", "1"], "a prompt has at least 2 tokens"),
        (["--page-size", "-64"], "-64 must be at least 1"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        gpu_attention.parse_args(arguments)
    assert said in capsys.readouterr().err


# What is timed.


@pytest.fixture
def quick_timing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_timing, "SAMPLE_S", 1e-3)
    monkeypatch.setattr(gpu_timing, "LATENCY_SAMPLES", 2)
    monkeypatch.setattr(gpu_timing, "CALLS_PER_PROGRAM", 6)


def variants(job: Job) -> dict[str, gpu_timing.Calls]:
    found = dict(gpu_jax.paged(job, "xla"))
    return found | {f"contiguous, {name}": calls for name, calls in gpu_jax.contiguous(job, "xla")}


@pytest.mark.nightly
@pytest.mark.parametrize("job", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_a_program_of_rounds_is_its_calls_one_by_one(job: Job):
    for name, calls in variants(job).items():
        q, state = calls.q, jax.tree.map(jnp.copy, calls.state)
        for i in [0, 1, 0] * 2:  # Two rounds of three calls, in two places.
            q, state = calls.attend(q, state, calls.common, calls.places[i])
        launcher = gpu_timing.Launcher(calls)
        out = launcher.launch_rounds(2, 3, 0)
        np.testing.assert_allclose(np.float32(out), np.float32(q), atol=0.03, err_msg=name)
        assert out.dtype == calls.q.dtype == jnp.bfloat16
        assert out.shape == calls.q.shape


@pytest.mark.parametrize("job", [pytest.param(DECODE, marks=pytest.mark.nightly), PREFILL], ids=["decode", "prefill"])
def test_each_place_has_keys_and_values_of_its_own(job: Job):
    for name, calls in variants(job).items():
        outs = [np.float32(gpu_timing.Launcher(replace_state(calls)).launch_one(i)) for i in (0, 1, 2)]
        # A whole prompt is written before it is read, so in each place it sees the same.
        assert np.array_equal(outs[0], outs[1]) == (name == "xla" and job is PREFILL), name
        np.testing.assert_array_equal(outs[0], outs[2])


def replace_state(calls: gpu_timing.Calls) -> gpu_timing.Calls:
    """The same, with a state of its own, which a launch may take."""
    return replace(calls, state=jax.tree.map(jnp.copy, calls.state))


def test_all_variants_compute_attention():
    """Contiguous ones of the same K and V; the paged one is compared with the reference elsewhere."""
    step = DECODE.step
    calls = {name: calls for name, calls in variants(DECODE).items() if name.startswith("contiguous")}
    plain, as_rows = calls["contiguous, heads"], calls["contiguous, heads as rows"]
    q_B1NH = plain.q
    B, K, G, H = step.num_seqs, step.num_kv_heads, step.num_heads // step.num_kv_heads, step.head_dim
    q_BGKH = jnp.swapaxes(q_B1NH.reshape(B, K, G, H), 1, 2)
    expected_B1NH, _ = plain.attend(q_B1NH, None, None, plain.places[0])
    out_BGKH, _ = as_rows.attend(q_BGKH, None, None, plain.places[0])
    out_B1NH = jnp.swapaxes(out_BGKH, 1, 2).reshape(q_B1NH.shape)
    np.testing.assert_allclose(np.float32(out_B1NH), np.float32(expected_B1NH), atol=0.02)


def test_queries_keep_their_size_through_many_calls():
    (job,) = decode_jobs((2, 1, 128), [2], [1024], 64)
    job = replace(job, num_places=2, num_pages=2 * 2 * 16 + 1)
    ((_, calls),) = gpu_jax.paged(job, "xla")
    out = gpu_timing.Launcher(calls).launch_rounds(8, 4, 0)
    assert 0.5 < float(jnp.std(out.astype(jnp.float32))) < 1.5


@pytest.mark.parametrize("job", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_short_calls_are_timed_in_programs_of_many(job: Job, quick_timing: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_timing, "LONG_CALL_S", 10.0)
    monkeypatch.setitem(gpu_jax.SYSTEMS, "cudnn", lambda job: gpu_jax.contiguous(job, "xla"))
    for system in ("xla", "cudnn"):
        figures = gpu_jax.measure(system, job, samples=2)
        assert figures["calls_per_program"] == 6
        assert 0 < figures["best_s"] <= figures["median_s"] < 1
        assert figures["variants_s"][figures["variant"]] == min(figures["variants_s"].values()) == figures["median_s"]
        json.dumps(figures)


def test_a_call_that_is_long_is_a_program_by_itself(quick_timing: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_timing, "LONG_CALL_S", 0.0)
    assert gpu_jax.measure("xla", DECODE, samples=2)["calls_per_program"] == 1


def test_a_launch_is_timed_by_what_many_take_together(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_timing, "SAMPLE_S", 0.05)
    launched = []

    def launch(i: int) -> jax.Array:
        launched.append(i)
        time.sleep(0.01)
        return jnp.zeros(())

    seconds = gpu_timing.time_launches(launch, samples=3)
    assert len(seconds) == 3
    assert all(0.01 <= s < 0.02 for s in seconds)
    assert launched[:2] == [0, 1]
    assert launched[2:] == [*range((len(launched) - 2) // 3)] * 3
    assert len(launched) > 2 + 3 * 2


def test_the_variant_that_fails_leaves_the_others(quick_timing: None, monkeypatch: pytest.MonkeyPatch):
    def failing(job: Job):
        ((name, calls),) = gpu_jax.paged(job, "xla")
        yield "failing", replace(calls, attend=lambda *_: 1 / 0)
        yield name, calls

    monkeypatch.setitem(gpu_jax.SYSTEMS, "xla", failing)
    assert list(gpu_jax.measure("xla", DECODE, samples=1)["variants_s"]) == ["xla"]
    monkeypatch.setitem(gpu_jax.SYSTEMS, "xla", lambda job: list(failing(job))[:1])
    with pytest.raises(ZeroDivisionError):
        gpu_jax.measure("xla", DECODE, samples=1)


def test_jax_kernel_for_pages_is_called_as_it_expects():
    """It lowers for a GPU only; what is checked is that shapes and options are such that it traces."""
    for job in decode_jobs((8, 2, 128), [1, 8], [1024], 64):
        names = []
        for name, calls in gpu_jax.triton(job):
            out, _ = jax.eval_shape(calls.attend, calls.q, calls.state, calls.common, calls.places[0])
            assert (out.shape, out.dtype) == (calls.q.shape, calls.q.dtype)
            names.append(name)
        assert names
    with pytest.raises(ValueError, match="is for decodes"):
        next(gpu_jax.triton(PREFILL))


def test_the_machine_says_what_it_is_and_measures_nothing_without_a_gpu():
    found = gpu_machine.run({})
    assert found["platform"] == "cpu"
    assert found["versions"]["jax"] == jax.__version__
    assert "copy_bytes_per_s" not in found


def test_rates_of_the_machine_count_what_they_move_and_multiply(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_timing, "time_launches", lambda launch: [jax.block_until_ready(launch(0)), 2.0][1:])
    assert gpu_machine.copy_rate(1 << 20) == (2 << 20) / 2.0
    assert gpu_machine.product_rate(64) == 2 * 64**3 * gpu_machine.PRODUCTS / 2.0


@pytest.mark.nightly
def test_the_cache_is_updated_in_place_by_each_program_that_is_timed():
    """Compiled for an H200: else a copy of it would be timed in place of attention."""
    for cache_bytes, aliased_bytes, temporary_bytes in compile_in_child(FOLDER_OF_TESTS / "rounds_program.py"):
        assert temporary_bytes < cache_bytes <= aliased_bytes


# Children.


CHILD = """
import json, os, sys, time
print("noise on standard output")
for number, job in enumerate(json.load(open(sys.argv[-1]))):
    match job["do"]:
        case "exit":
            sys.exit("out of luck")
        case "hang":
            time.sleep(60)
        case "decline":
            print(json.dumps({"unavailable": "no such thing"}), flush=True)
        case "fail":
            print(json.dumps({"job": number, "error": "failed"}), flush=True)
        case what:
            print(json.dumps({"job": number, "did": what, "pid": os.getpid()}), flush=True)
"""


def run_child(*what: str, **options) -> list[dict]:
    options = {"timeout_s": 20.0} | options
    return list(run_jobs([sys.executable, "-c", CHILD], [{"do": each} for each in what], **options))


def test_jobs_run_in_one_process_and_in_order():
    answers = run_child("a", "fail", "b")
    assert [answer.get("did") for answer in answers] == ["a", None, "b"]
    assert answers[1] == {"error": "failed"}
    assert answers[0]["pid"] == answers[2]["pid"]


def test_a_job_that_ends_its_process_costs_itself_only():
    answers = run_child("a", "exit", "b")
    assert [answer.get("did") for answer in answers] == ["a", None, "b"]
    assert answers[1] == {"error": "the process ended (1): out of luck"}


def test_a_job_that_hangs_costs_itself_only():
    start = time.monotonic()
    answers = run_child("hang", "b", timeout_s=3)
    assert answers[0] == {"error": "no answer in 3 s"}
    assert answers[1]["did"] == "b"
    assert time.monotonic() - start < 30


def test_jobs_that_all_end_their_process_are_given_up():
    answers = run_child(*["exit"] * 5)
    assert [answer["error"].split(":")[0] for answer in answers] == ["the process ended (1)"] * 3 + ["not begun"] * 2


def test_what_has_no_time_left_is_skipped():
    answers = run_child("a", "hang", "b", deadline=time.monotonic() + 3)
    assert answers[0]["did"] == "a"
    assert answers[1:] == [{"skipped": "the time was up"}] * 2


def test_a_child_can_say_that_it_is_not_available():
    with pytest.raises(UnavailableError, match="no such thing"):
        run_child("decline", "a")


def test_the_childs_side_turns_exceptions_into_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "jobs.json").write_text(json.dumps([{"x": 0}, {"x": 2}]))
    gpu_jobs.serve(lambda job: {"y": 1 / job["x"]}, str(tmp_path / "jobs.json"))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [{"job": 0, "error": "ZeroDivisionError: division by zero"}, {"job": 1, "y": 0.5}]


@pytest.mark.nightly
def test_the_jax_child_answers_what_is_asked(tmp_path: Path):
    jobs = [{**asdict(job), "samples": 1} for job in (DECODE, replace(DECODE, num_pages=2))]
    command = [sys.executable, "-m", "benchmarks.gpu.jax_kernels", "xla"]
    measured, failed = run_jobs(command, jobs, timeout_s=120)
    assert 0 < measured["median_s"] < 1
    assert "error" in failed  # So few pages do not hold its places.


def test_torch_that_is_not_there_leaves_a_line(capsys: pytest.CaptureFixture[str]):
    args = gpu_attention.parse_args(["--models", "llama-8b"])
    measured = [Measured(step=DECODE.step)]
    gpu_attention.run_system("torch", args, measured, [DECODE], None, time.monotonic() + 60)
    assert re.search("torch is left out: .*torch", capsys.readouterr().out)
    assert not measured[0].figures


def test_what_the_card_has_no_room_for_is_skipped():
    measured = [Measured(step=DECODE.step)]
    gpu_attention.run_system("xla", gpu_attention.parse_args([]), measured, [DECODE], 1000, time.monotonic() + 60)
    assert measured[0].figures == {"xla": {"skipped": "needs 0 GiB of the card's memory"}}


# Numerics.


def test_drawn_programs_are_such_as_a_hopper_kernel_takes():
    programs = [Program(**job["program"]) for job in gpu_check.draw_jobs(64)]
    assert {program.q_dtype for program in programs} == {"bfloat16", "float16"}
    narrow = {"int8", "float8_e4m3fn", "float8_e5m2"}
    assert all(program.kv_dtype in {program.q_dtype, *narrow} for program in programs)
    assert {program.kv_dtype for program in programs} == {"bfloat16", "float16", *narrow}
    assert {program.head_dim for program in programs} == {64, 128, 256}
    assert any(program.sliding_window for program in programs)
    assert any(program.decode_only for program in programs)


@pytest.mark.nightly
def test_the_check_passes_what_is_right_and_names_what_is_wrong(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_check, "CASES_PER_PROGRAM", 2)
    program = Program(
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        page_size=16,
        pages_per_seq=4,
        num_pages=30,
        num_seqs=6,
        num_tokens=32,
        q_dtype="bfloat16",
        kv_dtype="bfloat16",
    )
    found = gpu_check.check("xla", program, seed=1)
    assert 0 < found["largest_error"] < 3e-2
    right = gpu_check.ragged_paged_attention
    for change, said in (
        (lambda out, pages: (out * 1.1, pages), "case 0: largest error"),
        (lambda out, pages: (out.at[0, 0, 0].set(jnp.nan), pages), "case 0: largest error nan"),
        (lambda out, pages: (out, pages.at[0].set(0)), "case 0: other bits in the cache"),
    ):

        def wrong(*args, change=change, implementation, **options):
            outcome = right(*args, implementation=implementation, **options)
            return change(*outcome) if implementation == "xla" else outcome

        monkeypatch.setattr(gpu_check, "ragged_paged_attention", wrong)
        with pytest.raises(ValueError, match=said):
            gpu_check.check("xla", program, seed=1)


def test_a_program_that_is_refused_is_no_error():
    (job, *_) = gpu_check.draw_jobs(1)
    found = gpu_check.check("tpu", replace(Program(**job["program"]), num_heads=256, num_kv_heads=1), seed=1)
    assert "refused" in found


# Bars and tables.


def measured_step(num_seqs: int, q_len: int, kv_len: int, **seconds: float | None) -> Measured:
    """None is a failure."""
    (job,) = (
        decode_jobs((32, 8, 128), [num_seqs], [kv_len], 64) if q_len == 1 else prefill_jobs((32, 8, 128), [q_len], 64)
    )
    figures = {
        name: {"error": "failed"} if s is None else {"median_s": s, "best_s": s, "latency_s": 2 * s}
        for name, s in seconds.items()
    }
    return Measured(step=job.step, figures=figures)


def verdicts(*measured: Measured) -> list[bool | None]:
    return [verdict.met for verdict in judge(measured, MACHINE)]


def seconds_at(share: float, num_seqs: int, q_len: int, kv_len: int) -> float:
    step = measured_step(num_seqs, q_len, kv_len).step
    return (step.kv_bytes / 4e12 if q_len == 1 else step.flops / 800e12) / share


def test_nothing_measured_is_no_verdict():
    assert verdicts() == [None] * len(BARS)


@pytest.mark.parametrize(
    ("shape", "bar", "at_least"),
    [((32, 1, 4096), 0, 0.8), ((128, 1, 32_768), 0, 0.8), ((1, 1, 32_768), 1, 0.5), ((1, 8192, 8192), 2, 0.65)],
)
def test_a_bar_of_the_machines_rate_is_met_from_its_part_on(shape: tuple[int, int, int], bar: int, at_least: float):
    for share, met in ((at_least + 0.01, True), (at_least - 0.01, False)):
        found = verdicts(measured_step(*shape, gpu=seconds_at(share, *shape)))
        assert found[bar] is met
        assert [verdict for i, verdict in enumerate(found) if i != bar] == [None] * (len(BARS) - 1)


def test_a_bar_applies_to_its_steps_only():
    slow = [
        measured_step(8, 1, 4096, gpu=1.0),
        measured_step(32, 1, 1024, gpu=1.0),
        measured_step(1, 2048, 2048, gpu=1),
    ]
    assert verdicts(*slow) == [None] * len(BARS)


@pytest.mark.parametrize(("peer", "bar"), [("xla", 3), ("torch", 4)])
def test_ours_may_not_be_slower_than_a_peer_anywhere(peer: str, bar: int):
    fast, slow = (measured_step(8, 1, kv_len, gpu=1e-3, **{peer: s}) for kv_len, s in ((1024, 2e-3), (4096, 0.9e-3)))
    assert verdicts(fast)[bar] is True
    assert verdicts(fast, slow)[bar] is False
    *_, verdict = [verdict for verdict in judge([fast, slow], MACHINE) if verdict.bar.peer == peer]
    assert verdict.value == pytest.approx(0.9)
    assert verdict.worst == slow.step


def test_torch_is_a_bar_for_decodes_only():
    assert verdicts(measured_step(1, 2048, 2048, gpu=1.0, torch=1e-3))[4] is None


def test_a_step_at_which_ours_failed_misses_its_bars():
    good = measured_step(32, 1, 4096, gpu=seconds_at(0.9, 32, 1, 4096), xla=1.0)
    failed = measured_step(128, 1, 4096, gpu=None, xla=1.0)
    assert verdicts(good, failed)[0] is False
    assert verdicts(good, failed)[3] is False
    assert verdicts(failed)[0] is False


def test_a_missing_peer_is_said_to_be_missing():
    (verdict,) = [v for v in judge([measured_step(8, 1, 1024, gpu=1.0, torch=None)], MACHINE) if v.bar.peer == "torch"]
    assert verdict.met is None
    assert describe(verdict).startswith("not measured")
    assert "1 without a figure" in describe(verdict)


def test_what_is_beyond_the_machine_is_pointed_out():
    shape = (32, 1, 4096)
    steps = [measured_step(*shape, gpu=seconds_at(1.1, *shape), xla=seconds_at(1.2, *shape), torch=None)]
    (line,) = implausible(steps, MACHINE)
    assert line == "IMPLAUSIBLE   xla, 32/8 heads, batch 32, 4,096 tokens: 1.20 of what the machine reaches"


def test_a_verdict_names_the_worst_step():
    worst = measured_step(128, 1, 4096, gpu=seconds_at(0.85, 128, 1, 4096))
    better = measured_step(32, 1, 4096, gpu=seconds_at(0.95, 32, 1, 4096))
    line = describe(next(judge([better, worst], MACHINE)))
    assert line == (
        "met           decode, batch >= 32, context >= 4k: of the copy's bandwidth (at least 0.8, goal 0.9): 0.85 at "
        "the worst of 2, 32/8 heads, batch 128, 4,096 tokens, goal not reached"
    )


def test_a_run_prints_its_tables_and_writes_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """As on a GPU, with what there is on a CPU."""
    arguments = ["--models", "qwen3-0.6b", "--systems", "gpu", "xla", "triton", "--quick"]
    arguments += ["--batches", "32", "--contexts", "4096", "--prompts", "2", "--json", str(tmp_path / "figures.json")]
    monkeypatch.setattr(gpu_attention, "MEMORY_SHARE", 1e-5)  # Only the prompt fits.
    found = {**gpu_machine.describe(), "memory_bytes": 10**12, "copy_bytes_per_s": 1e10, "product_flops_per_s": 1e11}
    record = {"date": "today", "machine": found}
    gpu_attention.measure_on_gpu(gpu_attention.parse_args(arguments), record, time.monotonic() + 120)
    printed = capsys.readouterr().out
    assert "copy 0.01 TB/s" in printed
    assert re.search(r"\|    32 \|  4,096 \| skipped \|.*\| skipped \| skipped \|", printed)
    # Ours needs a GPU, and the kernel of JAX is not for prompts.
    assert re.search(r"\|     1 \|      2 \|  failed \|.*\| +[\d.,]+ \| +– \|", printed)
    written = json.loads((tmp_path / "figures.json").read_text())
    assert [step["kv_len"] for step in written["steps"]] == [4096, 2]
    figures = written["steps"][1]["figures"]
    assert "Hopper" in figures["gpu"]["error"] or "9.0" in figures["gpu"]["error"]
    assert figures["xla"]["median_s"] > 0
    assert [bar["met"] for bar in written["bars"]] == [None, None, None, False, None]


@pytest.mark.nightly
@pytest.mark.skipif(not (gpu_static.PLUGIN / ".installed").exists(), reason="`make cuda` installs JAX's CUDA plugin")
def test_without_a_gpu_the_kernels_are_compiled_and_described(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(gpu_static, "PROGRAMS", ("decode",))
    args = gpu_attention.parse_args(["--models", "llama-70b", "qwen3-32b", "--card", "h100"])
    (program,) = gpu_attention.compile_only(args)  # Both have the same heads.
    assert program["models"] == ["llama-70b", "qwen3-32b"]
    assert program["in_place"]
    for kernel in program["kernels"]:
        assert kernel["spill_bytes"] == 0
        assert kernel["blocks_per_sm"] >= 1
    assert sum(kernel["num_wgmma"] for kernel in program["kernels"]) > 0
    printed = capsys.readouterr().out
    assert all(re.search(rf"h100  64/8x128 +decode +{kernel['name']} ", printed) for kernel in program["kernels"])


def test_without_the_plugin_it_says_what_installs_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(gpu_static, "PLUGIN", tmp_path / "none")
    with pytest.raises(SystemExit, match="make cuda"):
        gpu_static.compile_kernels(["h200"], ["llama-8b"], 64)


def test_every_bar_is_of_the_machine_or_of_a_system_that_is_measured():
    assert all(isinstance(bar, Bar) and (bar.peer is None or bar.peer in gpu_attention.SYSTEMS) for bar in BARS)


def test_the_table_has_rates_parts_and_multiples():
    steps = [
        measured_step(32, 1, 4096, gpu=200e-6, xla=1e-3, torch=None),
        measured_step(8, 1, 4096, gpu=None, xla=1e-3),
        measured_step(8, 1, 1024),
    ]
    table = gpu_attention.format_table(steps, ["gpu", "xla", "torch"], "GB/s", 1e9, MACHINE)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert rows[0] == ["batch", "tokens", "GB/s", "of machine", "us", "best", "latency", "xla", "torch"]
    assert rows[2] == ["32", "4,096", "2,684", "67%", "200.0", "200.0", "400.0", "1,000.0 (5.00 x)", "failed"]
    assert rows[3] == ["8", "4,096", "failed", "", "", "", "", "1,000.0", "–"]
    assert rows[4] == ["8", "1,024", "–", "", "", "", "", "–", "–"]
    assert len({len(line) for line in table.splitlines()}) == 1
