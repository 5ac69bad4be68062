"""`AsyncLLM` on a tiny model: what comes through the process is what `LLM` gives."""

import asyncio
import time

import pytest
from stream_reading import collect

from jaxllm import AsyncLLM, EngineConfig, InvalidRequestError, SamplingParams
from jaxllm.engine.engine_stats import EngineStats
from jaxllm.scheduler import RequestStatus

PROMPTS = ["hello", "a longer prompt, of which each character is a token", "\u03a9mega \U0001f40d", "x"]


class Server:
    """An engine process, and the event loop of its client."""

    def __init__(self, folder):
        self._runner = asyncio.Runner()
        config = EngineConfig(
            model=str(folder),
            dtype="float32",
            max_num_seqs=16,
            max_num_batched_tokens=128,
            page_size=8,
            num_pages=16 * 16 + 1,
            compilation_cache_dir="",
        )
        self.llm = self.run(AsyncLLM.start(config))

    def run(self, coroutine):
        return self._runner.run(asyncio.wait_for(coroutine, 120.0))

    async def collect(self, prompt, params, **options):
        """The deltas of a request, each continuation's as one."""
        token_ids = self.llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        return await collect(await self.llm.submit(token_ids, params, **options))

    def generate(self, prompts, params, **options):
        """As `collect`, of all at once."""

        async def all_of_them():
            params_of = params if isinstance(params, list) else [params] * len(prompts)
            return await asyncio.gather(
                *(self.collect(prompt, own, **options) for prompt, own in zip(prompts, params_of, strict=True))
            )

        return self.run(all_of_them())

    async def until_idle(self):
        now = time.monotonic()
        while self.llm.stats.time < now or self.llm.stats.scheduler.num_running or self.llm.stats.scheduler.num_waiting:
            await asyncio.sleep(0.01)

    def close(self):
        self.run(self.llm.close())
        self._runner.close()


@pytest.fixture(scope="module")
def _server(tiny_folder):
    server = Server(tiny_folder)
    yield server
    server.close()


@pytest.fixture
def server(_server):
    yield _server
    _server.run(_server.until_idle())
    assert _server.llm.stats.scheduler.num_used_pages == 0
    assert _server.llm.stats.num_compilations_after_start == 0


def greedy(**changes):
    return SamplingParams(**{"temperature": 0, "max_tokens": 24, "ignore_eos": True, **changes})


@pytest.mark.parametrize("leave", ["close the stream", "close the client"])
def test_whoever_leaves_hears_of_all_tokens_that_were_made(server, leave):
    """Of a request that does not stream, too; and the number is what the engine has told."""

    async def check():
        llm, told = await AsyncLLM.connect(server.llm.process.address), []
        llm.on_tokens = told.append
        stream = await llm.submit([5, 6, 7], greedy(max_tokens=120), streams=False)
        first = await anext(stream)
        await server.collect([8], greedy(max_tokens=3))  # in each of its steps, `stream` gets a token as well
        if leave == "close the stream":
            stream.close()
            assert [delta async for delta in stream] == []
            while not stream.is_complete:
                await asyncio.sleep(0.001)
        else:
            await llm.close()
        rest = stream.take()
        assert (len(first.token_ids), rest.finish_reason, stream.take()) == (1, "abort", None)
        assert len(rest.token_ids) > 0
        assert rest.metrics.num_output_tokens == 1 + len(rest.token_ids) == sum(told)
        assert bool(rest.text) == (leave == "close the client")
        await llm.close()

    server.run(check())


KINDS = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 5},
    "truncated": {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 6},
    "end tokens": {"temperature": 5.0, "seed": 7, "ignore_eos": False, "max_tokens": 100},
    "stop string": {"stop": ["w", "never"]},
    "stop string kept": {"stop": "\ufffd", "include_stop_str_in_output": True},
    "stop string later": {"stop": ["w", "\ufffd"], "min_tokens": 9},
    "stop tokens": {"stop_token_ids": list(range(60))},
    "stop tokens later": {"stop_token_ids": list(range(60)), "min_tokens": 12},
    "special tokens": {"temperature": 5.0, "seed": 8, "skip_special_tokens": False},
    "logprobs": {"logprobs": 3},
    "logprobs and stop": {"logprobs": 0, "stop": "w"},
    "several": {"n": 4, "temperature": 1.0, "seed": 9, "logprobs": 1},
    "several greedy": {"n": 2, "stop": "w"},
    "no limit": {"max_tokens": None},
}


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_process_gives_what_llm_gives(server, tiny_llm, kind, streams):
    params = greedy(**KINDS[kind])
    expected = tiny_llm.generate(PROMPTS, params, use_tqdm=False)
    for output, deltas in zip(expected, server.generate(PROMPTS, params, streams=streams), strict=True):
        assert len(deltas) == params.n
        for completion, delta in zip(output.outputs, deltas, strict=True):
            for name in ("index", "text", "token_ids", "finish_reason", "stop_reason"):
                assert getattr(delta, name) == getattr(completion, name), name
            if params.logprobs is None:
                assert delta.logprobs is completion.logprobs is None
            else:
                for token, other in zip(delta.logprobs, completion.logprobs, strict=True):
                    assert token.token_id == other.token_id
                    assert token.logprob == pytest.approx(other.logprob, abs=1e-4)
                    assert [id_ for id_, _ in token.top] == [id_ for id_, _ in other.top]
            assert delta.metrics.num_output_tokens == len(completion.token_ids)


def test_a_stream_is_read_as_it_comes(server):
    async def read():
        start = time.monotonic()
        stream = await server.llm.submit([5, 6, 7], greedy(max_tokens=100))
        deltas = [delta async for delta in stream]
        assert len(deltas) > 10
        assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
        assert [delta.metrics for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
        metrics = deltas[-1].metrics
        times = [metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time, metrics.finished_time]
        times = [start, *times, time.monotonic()]
        assert times == sorted(times)
        assert metrics.num_output_tokens == 100
        [whole] = await server.collect([5, 6, 7], greedy(max_tokens=100))
        assert whole.text == "".join(delta.text for delta in deltas)

    server.run(read())


def test_a_request_that_does_not_stream_tells_its_first_token_and_the_rest(server):
    async def read():
        stream = await server.llm.submit([5, 6, 7], greedy(max_tokens=100), streams=False)
        deltas = [delta async for delta in stream]
        assert [len(delta.token_ids) for delta in deltas] in ([1, 99], [100])
        assert deltas[-1].metrics.first_token_time < deltas[-1].metrics.finished_time

    server.run(read())


def test_continuations_share_the_pages_of_the_prompt(server):
    prompt = [3 + number % 250 for number in range(72)]
    before = server.llm.stats.scheduler.num_prefix_hit_tokens
    [deltas] = server.generate([prompt], greedy(n=6, temperature=1.0, seed=1, max_tokens=8))
    server.run(server.until_idle())
    assert server.llm.stats.scheduler.num_prefix_hit_tokens - before >= 5 * 64
    assert len({tuple(delta.token_ids) for delta in deltas}) == 6
    assert sorted(delta.metrics.num_cached_tokens for delta in deltas)[1:] == [64] * 5


def test_cached_tokens_are_told_and_forgotten_on_demand(server):
    prompt = [203 - number for number in range(50)]

    def num_cached(**options):
        [[delta]] = server.generate([prompt], greedy(max_tokens=2), **options)
        return delta.metrics.num_cached_tokens

    assert num_cached() == 0
    assert num_cached() == 48
    assert num_cached(cache_salt="another's") == 0
    assert server.run(server.llm.reset_prefix_cache())
    assert num_cached() == 0

    async def reset_while_running():
        stream = await server.llm.submit(prompt, greedy(max_tokens=70))
        await anext(stream)
        assert not await server.llm.reset_prefix_cache()
        assert await server.llm.reset_prefix_cache(force=True)
        return (await collect(stream))[0].finish_reason

    assert server.run(reset_while_running()) == "length"


def test_what_was_sampled_when_it_is_aborted_is_told(server):
    """Of a request that does not stream, too."""

    async def abort(streams):
        stream = await server.llm.submit([5, 6, 7], greedy(max_tokens=120), request_id="a", streams=streams)
        first = await anext(stream)
        await asyncio.sleep(0.01)
        await server.llm.abort("a")
        [rest] = await collect(stream)
        assert rest.finish_reason == "abort"
        return first.token_ids + rest.token_ids, first.text + rest.text

    [[whole]] = server.generate([[5, 6, 7]], greedy(max_tokens=120))
    for streams in (True, False):
        token_ids, text = server.run(abort(streams))
        assert 0 < len(token_ids) < 120
        assert token_ids == whole.token_ids[: len(token_ids)]
        assert text.rstrip("\ufffd") == whole.text[: len(text.rstrip("\ufffd"))]


def test_a_timeout_gives_what_there_is(server):
    [[delta]] = server.generate([[5, 6, 7]], greedy(max_tokens=120), timeout_s=0.0)
    assert (delta.finish_reason, delta.token_ids) == ("timeout", [])


def test_ids_outside_of_the_vocabulary_are_refused(server):
    for wrong in (256, -1, 2**70):
        with pytest.raises(InvalidRequestError, match=r"token id .* is not in the vocabulary; .* from 0 to 255"):
            server.generate([[5, wrong]], greedy())


def test_what_the_engine_is_is_told(server, tiny_llm, tiny_folder):
    info = server.llm.info
    assert info.model == str(tiny_folder)
    assert info == tiny_llm.engine.info
    assert (info.max_model_len, info.vocab_size, info.page_size, info.num_pages) == (128, 256, 8, 257)
    assert (info.max_num_seqs, info.max_num_batched_tokens, info.dtype, info.platform) == (16, 128, "float32", "cpu")
    assert info.eos_token_ids == (2,)


def test_the_stats_add_up(server):
    before = server.llm.stats
    server.generate(PROMPTS, greedy())
    server.run(server.until_idle())
    after = server.llm.stats
    assert isinstance(after, EngineStats)
    assert after.num_output_tokens - before.num_output_tokens == 24 * len(PROMPTS)
    status = RequestStatus.FINISHED_LENGTH
    assert after.scheduler.num_requests[status] - before.scheduler.num_requests[status] == len(PROMPTS)
    num_prompt_tokens = sum(len(server.llm.tokenizer.encode(prompt)) for prompt in PROMPTS)
    num_cached_tokens = after.scheduler.num_prefix_hit_tokens - before.scheduler.num_prefix_hit_tokens
    then, now = before.scheduler.all_steps, after.scheduler.all_steps
    num_tokens = now.num_prefill_tokens + now.num_decode_tokens - then.num_prefill_tokens - then.num_decode_tokens
    assert num_tokens >= num_prompt_tokens + 23 * len(PROMPTS) - num_cached_tokens
    assert after.num_steps - before.num_steps >= 24
    assert after.host_s > before.host_s
    assert after.device_wait_s >= before.device_wait_s
    assert after.num_padded_tokens >= before.num_padded_tokens


def test_a_profile_is_written(server, tmp_path):
    async def profile():
        await server.llm.profile(str(tmp_path))
        with pytest.raises(InvalidRequestError, match="the profiler says"):
            await server.llm.profile(str(tmp_path))
        await server.collect("hello", greedy())
        await server.llm.profile(None)
        with pytest.raises(InvalidRequestError, match="the profiler says"):
            await server.llm.profile(None)

    server.run(profile())
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_a_token_has_a_text_and_bytes(server):
    encode = server.llm.tokenizer.encode
    assert server.llm.token_text(encode("h")[0]) == ("h", b"h")
    assert [server.llm.token_text(token_id) for token_id in encode("\U0001f40d")] == [
        ("\ufffd", bytes([byte])) for byte in "\U0001f40d".encode()
    ]
    assert server.llm.token_text(2) == ("</s>", b"</s>")


def test_requests_of_all_kinds_run_together(server, tiny_llm):
    """With more requests than rows; each gives what it gives alone."""
    params = [greedy(**list(KINDS.values())[number % len(KINDS)]) for number in range(60)]
    prompts = [PROMPTS[number % 4] for number in range(60)]
    expected = tiny_llm.generate(prompts, params, use_tqdm=False)
    for output, deltas in zip(expected, server.generate(prompts, params), strict=True):
        assert [delta.text for delta in deltas] == [completion.text for completion in output.outputs]
        assert [delta.token_ids for delta in deltas] == [completion.token_ids for completion in output.outputs]
