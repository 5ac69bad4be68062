"""A stream by itself: what its reader gets, asking or being told."""

import asyncio

import pytest

from jaxllm import OutputDelta, OutputStream


class Rig:
    """A stream of two continuations, and what was said about it."""

    def __init__(self):
        self.left = []
        self.news = 0
        self.stream = OutputStream("r", [7, 8], lambda handles, stream: self.left.append(handles))

    def listen(self):
        def on_news():
            self.news += 1

        self.stream.on_news = on_news

    def push(self, index, text, finish_reason=None):
        self.stream.push(OutputDelta(index, text, [len(text)], finish_reason=finish_reason))

    def take_all(self):
        taken = []
        while (delta := self.stream.take()) is not None:
            taken.append((delta.index, delta.text, delta.token_ids, delta.finish_reason))
        return taken


def test_a_listener_is_told_in_the_call_that_brings_news():
    rig = Rig()
    rig.listen()
    rig.push(0, "a")
    assert rig.news == 1
    assert rig.take_all() == [(0, "a", [1], None)]
    rig.push(1, "b", "stop")
    rig.push(0, "", "length")
    assert rig.news == 3
    assert rig.stream.is_complete
    assert rig.take_all() == [(1, "b", [1], "stop"), (0, "", [0], "length")]
    rig.stream.close()
    assert rig.left == []


def test_what_nobody_takes_merges():
    rig = Rig()
    for number in range(1000):
        rig.push(number % 2, "x")
    assert sum(map(len, rig.stream._pending.values())) <= 2 * 64
    rig.push(0, "y", "stop")
    assert rig.take_all() == [(0, "x" * 500 + "y", [1] * 501, "stop"), (1, "x" * 500, [1] * 500, None)]


def test_who_closes_early_leaves_once_and_the_listener_hears_it():
    rig = Rig()
    rig.listen()
    rig.push(0, "never read")
    rig.stream.close()
    assert (rig.left, rig.news) == ([[7, 8]], 2)
    rig.stream.close()
    assert rig.left == [[7, 8]]


def test_a_stream_that_was_left_still_has_what_was_made():
    async def run():
        rig = Rig()
        rig.push(0, "a")
        rig.stream.close()
        assert [delta async for delta in rig.stream] == []
        rig.push(0, "b", "abort")
        assert not rig.stream.is_complete
        rig.push(1, "", "abort")
        assert rig.stream.is_complete
        assert rig.take_all() == [(0, "ab", [1, 1], "abort"), (1, "", [0], "abort")]

    asyncio.run(run())


@pytest.mark.parametrize("pushes_first", [True, False])
def test_an_iterator_waits_for_what_comes(pushes_first):
    async def run():
        rig = Rig()

        async def push():
            for index in (0, 1):
                rig.push(index, "a")
                rig.push(index, "b", "stop")
                await asyncio.sleep(0)

        if pushes_first:
            await push()
        else:
            pushing = asyncio.create_task(push())
        texts = ["", ""]
        async for delta in rig.stream:
            texts[delta.index] += delta.text
        assert texts == ["ab", "ab"]
        assert pushes_first or await pushing is None

    asyncio.run(asyncio.wait_for(run(), 10.0))
