"""What explain() says of masks that exclude little, of copies, and of calls too large to make."""

from __future__ import annotations

import numpy as np

from attentile import explain


def test_explain_of_a_mask_of_one_column(compiled):
    q, k, v = np.ones((3, 1, 2, 4, 8), np.float32)
    mask = np.ones((4, 1), bool)
    assert any("mask is True everywhere" in note for note in explain(q, k, v, mask=mask).notes)
    mask[2] = False  # whole rows are excluded, which no structural option says
    assert not any("mask" in note for note in explain(q, k, v, mask=mask).notes)


def test_explain_of_a_mask_beside_scattered_segments(compiled):
    q, k, v = np.ones((3, 1, 2, 4, 8), np.float32)
    given = explain(q, k, v, mask=np.ones((4, 4), bool), segments=np.array([0, 1, 0, 1]))
    assert given.copies["mask"] == "combined with the segments, 16 bytes"


def test_explain_of_outputs_that_are_filled_by_a_copy(compiled):
    q, k, v = np.ones((3, 1, 2, 4, 8), np.float32)
    odd = np.zeros(q.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(q.shape)
    assert explain(q, k, v, out=odd).copies["out"].startswith("not aligned; a new array of 256 bytes")
    changed = explain(q, k, v, out=np.empty_like(q), score_mod=lambda s, b, h, i, j: s)
    assert changed.copies["out"].startswith("score_mod= given; a new array")


def test_explain_of_very_large_calls(compiled):
    x = np.broadcast_to(np.float32(0), (1, 1, 2**16, 64))
    text = str(explain(x, x, x, return_weights=True))
    assert "useful 1.1 TFLOP" in text  # 2 * 2**32 * (64 + 64)
    assert "output  16.02 GiB" in text  # 2**16 * (2**16 + 64) * 4 bytes
