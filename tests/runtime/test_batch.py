"""Arrays of a step."""

import numpy as np

from specexport.runtime.batch import Batch, Row
from specexport.runtime.tree import ROOT, Branches, whole_tree


def test_a_ragged_batch_has_each_tensor_as_the_graph_wants_it() -> None:
    batch = Batch.build([Row(3, [10, 11], 2), Row(0, [20, 21, 22], 1)], max_length=50)
    step = batch.step
    assert step.input_ids.tolist() == [[10, 11, 0], [20, 21, 22]]
    assert step.position_ids.tolist() == [[3, 4, 5], [0, 1, 2]]
    assert step.write_indices.tolist() == [3, 0]
    assert step.logits_indices.tolist() == [0, 1, 5]
    assert batch.logits_start == (0, 2)
    assert step.attention_mask.shape == (2, 1, 3, 5)
    assert step.attention_mask[0, 0].astype(int).tolist()[:2] == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert step.attention_mask[1, 0].astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
    ]


def test_a_window_hides_old_entries() -> None:
    mask = Batch.build([Row(4, [1, 2], 1)], max_length=50, window=3).step.attention_mask
    assert mask[0, 0].astype(int).tolist() == [[0, 0, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1]]


def test_positions_of_padding_stay_inside_the_tables() -> None:
    step = Batch.build([Row(9, [1], 1), Row(0, [1] * 6, 1)], max_length=10).step
    assert step.position_ids.max() == 9


def test_an_idle_row_writes_past_the_end_and_does_not_lengthen_the_batch() -> None:
    batch = Batch.build([Row.idle(100), Row(2, [5, 6], 1)], max_length=100)
    assert batch.step.write_indices.tolist() == [100, 2]
    assert batch.step.attention_mask.shape[3] == 4
    assert batch.step.logits_indices.tolist() == [3]


def test_a_batch_without_wanted_logits_asks_for_one() -> None:
    step = Batch.build([Row.idle(100), Row(0, [5, 6], 0)], max_length=100).step
    assert step.logits_indices.tolist() == [2]


def test_every_tensor_is_contiguous_and_of_the_graphs_type() -> None:
    step = Batch.build([Row(0, [1, 2], 1), Row(5, [3], 1)], max_length=9, window=4).step
    for array in (step.input_ids, step.position_ids, step.write_indices, step.logits_indices):
        assert array.dtype == np.int64
        assert array.flags.c_contiguous
    assert step.attention_mask.dtype == np.bool_
    assert step.attention_mask.flags.c_contiguous


def test_nodes_of_a_tree_stand_at_their_depth_and_see_the_text_and_their_ancestors() -> None:
    tree = whole_tree(3, (ROOT, ROOT, 0, 1))  # below two pending tokens at 1 and 2
    step = Batch.build([Row(1, [5, 6, 10, 11, 12, 13], 5, tree), Row(0, [7], 1)], 50).step
    assert step.position_ids[0].tolist() == [1, 2, 3, 3, 4, 4]
    assert step.attention_mask[0, 0].astype(int).tolist() == [
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 0, 1, 0, 0],
        [1, 1, 1, 1, 0, 1, 0],
        [1, 1, 1, 0, 1, 0, 1],
    ]
    assert step.logits_indices.tolist() == [1, 2, 3, 4, 5, 6]


def test_a_later_level_of_a_tree_sees_the_levels_that_are_in_the_cache() -> None:
    depths, sees = np.array([0, 0, 1, 1]), np.array([[1, 0, 1, 0], [0, 1, 0, 1]], dtype=np.bool_)
    step = Batch.build([Row(4, [8, 9], 2, Branches(2, depths, sees))], 50).step
    assert step.position_ids[0].tolist() == [3, 3]
    assert step.write_indices.tolist() == [4]
    assert step.attention_mask[0, 0].astype(int).tolist() == [
        [1, 1, 1, 0, 1, 0],
        [1, 1, 0, 1, 0, 1],
    ]


def test_a_chain_as_a_tree_has_the_mask_of_plain_text() -> None:
    for window in (None, 1, 3):
        tree = whole_tree(6, (ROOT, 0, 1))
        as_tree = Batch.build([Row(5, [1, 2, 3, 4], 4, tree)], 50, window).step
        plain = Batch.build([Row(5, [1, 2, 3, 4], 4)], 50, window).step
        np.testing.assert_array_equal(as_tree.attention_mask, plain.attention_mask)
        np.testing.assert_array_equal(as_tree.position_ids, plain.position_ids)


def test_a_window_counts_positions_of_a_tree_not_cache_entries() -> None:
    tree = whole_tree(4, (ROOT, ROOT, ROOT, 2, 3))
    mask = Batch.build([Row(4, [1] * 5, 5, tree)], 50, window=3).step.attention_mask
    assert mask[0, 0, 4].astype(int).tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 1]
    assert mask[0, 0, 3].astype(int).tolist() == [0, 0, 0, 1, 0, 0, 1, 1, 0]


def test_hidden_states_are_padded_like_tokens() -> None:
    states = np.arange(4, dtype=np.float32).reshape(2, 2) + 1
    step = Batch.build([Row.idle(50), Row(0, [5, 6], 1, hidden_states=states)], 50).step
    assert step.hidden_states is not None
    np.testing.assert_array_equal(step.hidden_states[1], states)
    assert not step.hidden_states[0].any()
