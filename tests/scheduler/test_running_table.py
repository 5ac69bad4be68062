"""A row is blank between its owners."""

import numpy as np

from jaxllm.scheduler import Request, RunningTable, SamplingRow


def test_a_request_gets_its_tokens_back_and_leaves_a_blank_row(make_config):
    table = RunningTable(make_config())
    request = Request("a", [1, 2, 3], max_tokens=4, stop_token_ids=(9, 8, 7))
    row = table.admit(request)
    table.append_pages(row, [5])
    table.num_computed_tokens[row] = 3
    table.num_total_tokens[row] = 4
    table.append_token(np.array([row]), np.array([42]))
    assert request.output_token_ids == [42]
    assert table.release(np.array([row])) == [[5]]
    assert (request.prompt_token_ids, request.output_token_ids) == ([1, 2, 3], [42])
    assert table.released_at[row] == table.last_release == table.step_number
    table.check_integrity()
    table.token_ids[row] = -1
    assert request.output_token_ids == [42], "a view of a row that is somebody else's now"


def test_stop_tokens_of_a_former_owner_are_gone(make_config):
    table = RunningTable(make_config(max_num_seqs=1))
    row = table.admit(Request("a", [1], max_tokens=1, stop_token_ids=(4, 5, 6, 2**31 - 1)))
    table.release(np.array([row]))
    table.admit(Request("b", [1], max_tokens=1, stop_token_ids=(7,)))
    assert table.may_stop(np.array([4, 5, 6, 7, 2**31 - 1])).tolist() == [False, False, False, True, False]
    table.check_integrity()


def test_sampling_settings_reach_the_row(make_config):
    table = RunningTable(make_config())
    sampling = SamplingRow(temperature=0.5, top_k=3, top_p=0.25, min_p=0.125, seed=2**32 - 1)
    row = table.admit(Request("a", [1], max_tokens=1, sampling=sampling))
    bits = table.sampling[:, row].copy()
    assert bits[[0, 2, 3]].view(np.float32).tolist() == [0.5, 0.25, 0.125]
    assert bits[[1, 4]].view(np.uint32).tolist() == [3, 2**32 - 1]


def test_a_wide_table_takes_no_memory_before_tokens_come(make_config):
    table = RunningTable(make_config(max_num_seqs=256, max_num_batched_tokens=256, max_model_len=2**20))
    assert table.token_ids.nbytes == 2**30
    table.admit(Request("a", [1], max_tokens=1))
