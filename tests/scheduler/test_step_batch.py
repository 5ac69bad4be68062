"""The batch is the plan, padded: compared with a builder that goes token by token."""

import numpy as np
import pytest

from jaxllm.scheduler import BatchLayout, Bucket, Request, SamplingRow, StepBatch


def slow_build(plan, table, bucket):
    """Every field as a plain list, one row and one token at a time."""
    batch = {
        "token_ids": [],
        "positions": [],
        "cu_q_lens": [0],
        "page_table": [[] for _ in table.page_table],
        **{name: [] for name in ("kv_lens", "rows", "logits_rows", "from_device")},
        **{name: [] for name in SamplingRow.dtypes()},
        "num_seqs": [len(plan.rows)],
    }
    for i, row in enumerate(plan.rows.tolist()):
        start, length = int(plan.num_computed_tokens[i]), int(plan.num_scheduled_tokens[i])
        for position in range(start, start + length):
            is_known = position < table.num_tokens[row]
            assert is_known != plan.from_device[i]
            batch["token_ids"].append(int(table.token_ids[row, position]) if is_known else 0)
            batch["positions"].append(position)
        batch["cu_q_lens"].append(len(batch["token_ids"]))
        batch["kv_lens"].append(start + length)
        for group, group_tables in enumerate(batch["page_table"]):
            pages = table.page_table[group, row, : table.num_pages[row]].tolist()
            group_tables.append(pages + [0] * (table.page_table.shape[2] - len(pages)))
        batch["rows"].append(row)
        batch["logits_rows"].append(len(batch["token_ids"]) - 1)
        batch["from_device"].append(int(plan.from_device[i]))
        for name in SamplingRow.dtypes():
            batch[name].append(getattr(table.requests[row].sampling, name))
    num_tokens = len(batch["token_ids"])
    for _ in range(bucket.num_tokens - num_tokens):
        batch["token_ids"].append(0)
        batch["positions"].append(0)
    for _ in range(bucket.num_seqs - len(plan.rows)):
        batch["cu_q_lens"].append(num_tokens)
        for group_tables in batch["page_table"]:
            group_tables.append([0] * table.page_table.shape[2])
        batch["rows"].append(table.num_rows)
        for name in ("kv_lens", "logits_rows", "from_device"):
            batch[name].append(0)
        for name in SamplingRow.dtypes():
            batch[name].append(getattr(SamplingRow(), name))
    return batch


@pytest.mark.parametrize(("num_ahead", "windows"), [(0, (None,)), (1, (None,)), (1, (None, 7))])
def test_build_agrees_with_a_builder_that_goes_token_by_token(make_loop, monkeypatch, num_ahead, windows):
    rng = np.random.default_rng(num_ahead)
    loop = make_loop(num_ahead, num_pages=70, windows=windows)
    build, kinds = StepBatch.build, set()

    def compare(plan, table, bucket):
        batch = build(plan, table, bucket)
        for name, expected in slow_build(plan, table, bucket).items():
            np.testing.assert_array_equal(getattr(batch, name), np.asarray(expected, getattr(batch, name).dtype), name)
        kinds.add((bucket.is_decode_only, bool(plan.from_device.any()), plan.num_tokens == bucket.num_tokens))
        return batch

    monkeypatch.setattr(StepBatch, "build", compare)
    for index in range(40):
        sampling = SamplingRow(
            temperature=float(rng.random()),
            top_k=int(rng.integers(0, 50)),
            top_p=float(rng.random()) + 1e-3,
            min_p=float(rng.random()),
            seed=int(rng.integers(0, 2**32)),
            wants_logprobs=bool(rng.integers(0, 2)),
        )
        prompt = rng.integers(0, 61, rng.integers(1, 60)).tolist()
        loop.add(Request(f"r{index}", prompt, max_tokens=int(rng.integers(1, 40)), sampling=sampling))
    loop.run()
    assert {kind[0] for kind in kinds} == {kind[2] for kind in kinds} == {False, True}
    assert any(kind[1] for kind in kinds) == (num_ahead > 0)


def test_arrays_tile_the_buffer_without_gap_or_overlap():
    layout = BatchLayout.of(Bucket.mixed(64, 8), max_pages_per_seq=5, num_groups=2)
    end = 0
    for name, field in layout.fields.items():
        assert field.offset == end, name
        end += int(np.prod(field.shape))
        assert field.end == end
    assert layout.size == end
    assert layout.fields["page_table"].shape == (2, 8, 5)


def test_arrays_are_views_and_floats_are_bit_casts(make_loop):
    loop = make_loop()
    loop.add(Request("a", [1, 2, 3], max_tokens=1, sampling=SamplingRow(temperature=0.5, seed=2**32 - 1)))
    plan = loop.scheduler.schedule()
    batch = StepBatch.build(plan, loop.scheduler.table, Bucket.mixed(64, 8))
    for name, view in batch.layout.views(batch.buffer).items():
        assert np.shares_memory(view, batch.buffer)
        assert np.shares_memory(getattr(batch, name), view)
    assert batch.buffer.dtype == np.int32
    assert batch.temperature.dtype == np.float32
    assert batch.buffer[batch.layout.fields["temperature"].offset] == np.float32(0.5).view(np.int32)
    assert batch.seed.dtype == np.uint32
    assert batch.seed[0] == 2**32 - 1


def test_two_steps_never_share_a_buffer(make_loop):
    loop = make_loop()
    loop.add(Request("a", [1, 2, 3], max_tokens=1))
    plan, table = loop.scheduler.schedule(), loop.scheduler.table
    first, second = (StepBatch.build(plan, table, Bucket.mixed(64, 8)) for _ in range(2))
    assert not np.shares_memory(first.buffer, second.buffer)
    assert not np.shares_memory(first.buffer, table.page_table)


def test_a_bucket_that_does_not_fit_is_not_built_for(make_loop):
    loop = make_loop()
    loop.add(Request("a", [1, 2, 3], max_tokens=1))
    plan = loop.scheduler.schedule()
    for bucket in (Bucket.mixed(2, 1), Bucket.decodes(8)):
        with pytest.raises(AssertionError, match="does not fit"):
            StepBatch.build(plan, loop.scheduler.table, bucket)
