import torch

from asyncrl.engines.rows import Records, Rows


def make_rows() -> Rows:
    rows = Rows(8, torch.device("cpu"))
    stop = rows.stop_set((3,), 10)
    for record in (4, 5, 6, 7):
        rows.append([[record, 2, 3, stop]], 1.0, False)
    return rows


def test_the_last_rows_close_the_gaps():
    rows = make_rows()
    assert rows.plan_removal([0, 2]) == ([3], [0])
    assert rows.plan_removal([3]) == ([], [])
    assert rows.plan_removal([0, 1, 2, 3]) == ([], [])
    assert rows.plan_removal([1]) == ([3], [1])


def test_a_moved_row_keeps_its_state():
    rows = make_rows()
    rows.emit(torch.tensor([1, 2, 4, 5]), torch.zeros(4))
    rows.move(torch.tensor([3]), torch.tensor([0]))
    rows.count = 3
    assert rows.tokens.tolist() == [5, 2, 4]
    assert rows.records.tolist() == [7, 5, 6]


def test_emit_advances_and_tells_who_ends_and_why():
    rows = make_rows()
    assert rows.positions.tolist() == [1, 1, 1, 1]
    first = rows.emit(torch.tensor([1, 3, 4, 5]), torch.tensor([-1.0, -1.0, float("nan"), -1.0]))
    assert rows.positions.tolist() == [2, 2, 2, 2]
    assert rows.new_tokens.tolist() == [1, 1, 1, 1]
    assert first.stopped.tolist() == [False, True, False, False]
    assert first.broken.tolist() == [False, False, True, False]
    assert first.full.tolist() == [False] * 4
    rows.emit(torch.tensor([1, 1, 1, 1]), torch.zeros(4))
    assert rows.emit(torch.tensor([1, 1, 1, 3]), torch.zeros(4)).full.tolist() == [True] * 4


def test_each_row_has_its_own_stop_tokens():
    rows = Rows(4, torch.device("cpu"))
    none, two, again = rows.stop_set((), 6), rows.stop_set((1, 5), 6), rows.stop_set((5, 1), 6)
    assert two == again != none
    rows.append([[0, 1, 9, none]], 1.0, False)
    rows.append([[1, 1, 9, two]], 1.0, False)
    assert rows.emit(torch.tensor([5, 5]), torch.zeros(2)).stopped.tolist() == [False, True]


def test_records_keep_what_they_hold_when_they_grow():
    records = Records(2, layers=1, top_k=2, wide_routes=True, device=torch.device("cpu"))
    at, index = torch.tensor([1]), torch.tensor([0])
    records.reserve(1)
    records.put_tokens(at, index, torch.tensor([7]), torch.tensor([-0.5]))
    # 40000 does not fit int16: the bits are kept and read as uint16.
    records.put_routes(at, index, torch.tensor([[[3, 40_000]]]))
    records.reserve(4)
    tokens, logprobs, routes = records.read([1], 2)
    assert tokens.tolist() == [[7, 0]]
    assert logprobs.tolist() == [[-0.5, 0.0]]
    assert routes.numpy().view("uint16").tolist() == [[[[3, 40_000]], [[0, 0]]]]
