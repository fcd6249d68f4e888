"""Whose rows are whose: arrays alone, no engine."""

import numpy as np

from replay.engine.config import Record
from replay.engine.rows import Batch, Rows, select

# a decodes its 9th token, b is at token 4 of a prompt of 6, c has its whole prompt of 3; two rows of padding.
BATCH = Batch(("a", "b", "c"), (1, 2, 3), (8, 4, 0), (5, 9, 3), (9, 9, 3), 8)


def rows(**asked: object) -> Rows:
    """What a recording keeps of the batch."""
    return select(BATCH, Record(folder="x", **asked))  # type: ignore[arg-type]  # as a file would hold it


def test_owner_and_position_of_every_row() -> None:
    """Requests in the order of the batch, positions from what was computed before, padding behind."""
    found = rows()
    assert found.requests == ("a", "b", "c")
    assert found.owner == (0, 1, 1, 2, 2, 2, -1, -1)
    assert found.position == (8, 4, 5, 0, 1, 2, 0, 0)
    assert found.decodes == (True, *[False] * 7)
    assert found.kept.tolist() == list(range(8))
    assert found.batch_rows == 8


def test_who_samples() -> None:
    """A request whose prompt is done, from its last row: b has three tokens of its prompt to go."""
    requests, numbers = rows().sampled
    assert requests.tolist() == [0, 2]
    assert numbers.tolist() == [0, 5]


def test_phases_and_requests() -> None:
    """Filters leave rows out, and the requests that lose all of theirs; a request's filter leaves no padding."""
    decode = rows(phases=("decode",))
    assert decode.requests == ("a",)
    assert decode.owner == (0, -1, -1)
    assert decode.kept.tolist() == [0, 6, 7]
    mine = rows(requests="^[bc]$")
    assert mine.requests == ("b", "c")
    assert mine.owner == (0, 0, 1, 1, 1)
    assert mine.sampled[1].tolist() == [4]
    assert not len(rows(requests="nobody").kept)


def test_decoded_rows() -> None:
    """The places of decode rows in the batch, and their numbers among what is kept."""
    places, numbers = rows(requests="^b$").decoded(3)
    assert places.tolist() == [1, 2]
    assert numbers.tolist() == [0, 1]
    assert select(Batch((), (), (), (), (), 0), Record(folder="x")).kept.dtype == np.int64


def test_a_preempted_request_computes_again() -> None:
    """A prompt of 4 with 6 tokens of its answer: all it had is computed again as prefill, in two chunks, and only the second
    samples."""
    first = select(Batch(("a",), (8,), (0,), (4,), (10,), 8), Record(folder="x"))
    assert first.decodes == (False,) * 8
    assert not len(first.sampled[0])
    second = select(Batch(("a",), (2,), (8,), (4,), (10,), 2), Record(folder="x"))
    assert second.decodes == (False, True)
    assert second.sampled[0].tolist() == [0]
