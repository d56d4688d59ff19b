"""Routes of SGLang's replies: every form that builds send gives the same array, everything else is refused by name."""

import base64

import numpy as np
import pytest

from asyncrl.engines.sglang.routes import RouteDecoder
from asyncrl.errors import RouteError
from asyncrl.types import ModelInfo

INFO = ModelInfo((2, 3, 4, 5), 8, 2, 100)
"""6 layers, of which 0 and 1 are dense."""


def encoded(ids) -> str:
    return base64.b64encode(np.asarray(ids).astype("<i4").tobytes()).decode()


def rows_of(count, info=INFO, seed=0):
    """Random distinct ids int64 [count, L, K]."""
    order = np.random.default_rng(seed).random((count, len(info.layers), info.num_experts)).argsort(-1)
    return order[..., : info.top_k]


def with_dense(routes, layers=6, info=INFO, filled=0):
    """One plane for every layer; those of dense layers hold `filled`."""
    planes = np.full((len(routes), layers, routes.shape[2]), filled)
    planes[:, list(info.layers)] = routes
    return planes


def decode(ids, tokens, start=0, decoder=None, info=INFO, layers=6):
    return (decoder or RouteDecoder(info, layers)).decode(encoded(ids), tokens, start, request="r7")


@pytest.mark.parametrize("filled", [0, -1, 999])
def test_dense_layers_are_cut_out_by_their_number(filled):
    routes = rows_of(7)
    got = decode(with_dense(routes, filled=filled), 8)
    assert got.dtype == np.uint8
    np.testing.assert_array_equal(got, routes)


def test_b08_six_planes_and_four_give_each_layer_its_own_plane():
    # Plane i is filled with i, and the second column tells it apart within its row.
    planes = np.stack([np.arange(6), np.array([7, 7, 7, 7, 7, 6])], -1)[None].repeat(3, 0)
    for ids in (planes, planes[:, 2:]):
        assert decode(ids, 4)[:, :, 0].tolist() == [[2, 3, 4, 5]] * 3
        assert decode(ids, 4)[:, :, 1].tolist() == [[7, 7, 7, 6]] * 3


def test_b08_another_number_of_planes_is_refused_naming_all_three():
    words = (
        r"r7: expected 7 rows of 6 .* or 4 planes x 2 \(6 layers, 4 of them MoE\), received 70 ids: 5 planes in 7 rows"
    )
    with pytest.raises(RouteError, match=words):
        decode(rows_of(7, ModelInfo((0, 1, 2, 3, 4), 8, 2, 9)), 8)


def test_layers_between_dense_ones_keep_their_numbers():
    info = ModelInfo((1, 3), 8, 2, 100)
    routes = rows_of(5, info)
    np.testing.assert_array_equal(decode(with_dense(routes, 4, info), 6, info=info, layers=4), routes)


def test_the_id_width_comes_from_the_number_of_experts_and_not_from_the_values():
    info = ModelInfo((0,), 512, 4, 100)
    got = decode([[[0, 255, 256, 511]], [[3, 2, 1, 0]]], 3, info=info, layers=1)
    assert got.dtype == np.uint16
    assert got.tolist() == [[[0, 255, 256, 511]], [[3, 2, 1, 0]]]
    small = decode([[[3, 2, 1, 0]]], 2, info=ModelInfo((0,), 256, 4, 100), layers=1)
    assert small.dtype == np.uint8


@pytest.mark.parametrize("shared", [8, 9, -1])
@pytest.mark.parametrize("extra", [1, 2])
@pytest.mark.parametrize("dense", [True, False])
def test_columns_of_fused_shared_experts_are_removed(shared, extra, dense):
    # SGLang writes E (or E + a random number below f) there; a build that pads the capture leaves -1.
    routes = rows_of(7)
    wide = np.concatenate([routes, np.full((7, 4, extra), shared)], -1)
    np.testing.assert_array_equal(decode(with_dense(wide) if dense else wide, 8), routes)


def test_a_column_more_that_holds_experts_is_refused():
    wide = rows_of(7, ModelInfo(INFO.layers, 8, 3, 100))
    wide[:-1, :, 2] = 8
    with pytest.raises(RouteError, match=r"r7: row 6 of 7, layer 2: expert id \d stands in a column beyond the 2"):
        decode(wide, 8)


@pytest.mark.parametrize("width", [1, 0])
def test_fewer_columns_than_the_model_chooses_are_refused(width):
    with pytest.raises(RouteError, match=r"r7: .*(expected 7 rows|routes lost)"):
        decode(rows_of(7)[..., :width], 8)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (8, r"expert id 8 is outside \[0, 8\): ids of physical slots, not of experts; start the server without"),
        (2**31 - 1, r"expert id 2147483647 is outside \[0, 8\)"),
        (-1, "expert id -1 is no expert: the engine captured nothing there"),
    ],
)
def test_ids_that_are_no_experts_are_refused_with_their_place(bad, words):
    routes = rows_of(7)
    routes[4, 1, 0] = bad
    with pytest.raises(RouteError, match=rf"r7: row 4 of 7, layer 3: {words}"):
        decode(routes, 8)


@pytest.mark.parametrize("ids", [np.zeros((7, 6, 2)), np.full((7, 4, 2), 5)], ids=["zeros", "equal"])
def test_b05_rows_that_name_an_expert_twice_are_refused(ids):
    with pytest.raises(
        RouteError, match=r"r7: row 0 of 7, layer 2: expert id \d stands there twice: .*capture is broken"
    ):
        decode(ids, 8)


def test_a_row_may_hold_what_the_row_before_and_the_layer_beside_it_hold():
    one = np.broadcast_to(rows_of(1)[:, :1], (7, 4, 2))
    np.testing.assert_array_equal(decode(one, 8), one)


def test_top_1_has_nothing_that_could_stand_twice():
    info = ModelInfo((0, 1), 8, 1, 100)
    assert decode(np.zeros((3, 2, 1)), 4, info=info, layers=2).tolist() == [[[0], [0]]] * 3


# --- rows ------------------------------------------------------------------------------------------


def test_b02_seven_tokens_have_six_rows_and_neither_five_nor_eight():
    decoder = RouteDecoder(INFO, 6)
    np.testing.assert_array_equal(decode(rows_of(6), 7, decoder=decoder), rows_of(6))
    for count in (5, 7, 8):
        with pytest.raises(
            RouteError, match=rf"r7: expected 6 rows of 4 planes x 2 .*received {8 * count} ids: {count} rows"
        ):
            decode(rows_of(count), 7, decoder=decoder)


def test_b02_prompt_without_a_new_token():
    # 6 prompt tokens, nothing sampled: the row of the last prompt token is missing like that of any last token.
    assert decode(rows_of(5), 6).shape == (5, 4, 2)
    for blob in (None, ""):
        assert RouteDecoder(INFO, 6).decode(blob, 1, request="r7").shape == (0, 4, 2)
    # All of it was known before.
    assert RouteDecoder(INFO, 6).decode("", 6, 5, request="r7").shape == (0, 4, 2)
    np.testing.assert_array_equal(decode(rows_of(5), 6, 5), np.zeros((0, 4, 2)))


@pytest.mark.parametrize("blob", [None, ""])
def test_b07_missing_routes_are_lost_and_not_an_empty_array(blob):
    with pytest.raises(RouteError, match=r"r7: routes lost: expected 7 rows, received none; .*enable-return-routed"):
        RouteDecoder(INFO, 6).decode(blob, 8, request="r7")


def test_rows_before_the_start_are_left_out_of_a_full_reply():
    routes = rows_of(13)
    for ids in (routes, routes[8:], with_dense(routes), with_dense(routes[8:])):
        np.testing.assert_array_equal(decode(ids, 14, 8), routes[8:])


@pytest.mark.parametrize("blob", ["%%%", "AAA", "AAAA*AAA", base64.b64encode(b"12345").decode(), 17, ["AAAA"]])
def test_what_is_no_base64_of_numbers_is_refused(blob):
    with pytest.raises(RouteError, match=r"r7: routed_experts (is|has)"):
        RouteDecoder(INFO, 6).decode(blob, 2, request="r7")


@pytest.mark.parametrize(("tokens", "start"), [(0, 0), (5, 5), (5, -1)])
def test_rows_that_cannot_be_asked_for_are_refused(tokens, start):
    with pytest.raises(RouteError, match=f"r7: there are no routes of {tokens} tokens from row {start} on"):
        decode(rows_of(4), tokens, start)


def test_a_model_whose_layers_do_not_fit_has_no_decoder():
    for info, layers in ((INFO, 5), (ModelInfo((), 0, 0, 100), 6)):
        with pytest.raises(RouteError, match="nothing to decode"):
            RouteDecoder(info, layers)


# --- one layout per server ----------------------------------------------------------------------------


def test_the_first_reply_settles_the_layout_and_another_one_is_refused():
    decoder = RouteDecoder(INFO, 6)
    decode(with_dense(rows_of(7)), 8, decoder=decoder)
    words = "expected 7 rows of 6 planes x 2 as in the first reply, received 56 ids: 4 planes in 7 rows"
    with pytest.raises(RouteError, match=words):
        decode(rows_of(7), 8, decoder=decoder)
    decode(with_dense(rows_of(4)), 5, decoder=decoder)


def test_a_reply_without_rows_settles_nothing():
    decoder = RouteDecoder(INFO, 6)
    decoder.decode("", 1, request="r7")
    np.testing.assert_array_equal(decode(rows_of(7), 8, decoder=decoder), rows_of(7))


def test_a_reply_of_one_row_less_that_divides_by_chance_is_not_read_as_another_layout():
    # 12 rows of 13 planes are as many ids as 13 rows of 12 planes.
    info = ModelInfo(tuple(range(1, 13)), 8, 2, 100)
    short = with_dense(rows_of(12, info), 13, info)
    with pytest.raises(RouteError, match="stands there twice"):
        decode(short, 14, info=info, layers=13)
    decoder = RouteDecoder(info, 13)
    decode(with_dense(rows_of(13, info), 13, info), 14, decoder=decoder)
    with pytest.raises(RouteError, match=r"expected 13 rows of 13 planes x 2 as in the first reply, .*: 12 rows of"):
        decode(short, 14, decoder=decoder)


def test_a_first_reply_that_reads_in_two_ways_is_refused():
    # Top-1: 12 rows of 13 planes and 13 rows of 12 planes both hold experts only, and the start leaves both open.
    info = ModelInfo(tuple(range(1, 13)), 8, 1, 100)
    with pytest.raises(RouteError, match="156 ids read as 12 rows of 13 planes x 1 and as 13 rows of 12 planes x 1"):
        decode(np.zeros((12, 13, 1)), 14, 1, info=info, layers=13)


@pytest.mark.parametrize(("layers", "top_k", "extra"), [(6, 2, 1), (6, 4, 2), (8, 3, 1), (5, 8, 0), (48, 8, 2)])
def test_honest_replies_read_in_one_way_whatever_their_layout(layers, top_k, extra):
    info = ModelInfo(tuple(range(2, layers)), 16, top_k, 100)
    routes = rows_of(11, info)
    wide = np.concatenate([routes, np.full((*routes.shape[:2], extra), 16)], -1)
    for ids in (wide, with_dense(wide, layers, info)):
        np.testing.assert_array_equal(decode(ids, 12, info=info, layers=layers), routes)


# --- turns --------------------------------------------------------------------------------------------

ENDS = (5, 9, 14)
"""S of each turn of a conversation, with everything before it."""


def merged(form, rows):
    """Turns that end at ENDS, each asked for from the row that no turn before it could have."""
    decoder, parts, counts, starts = RouteDecoder(INFO, 6), [], [], [0]
    for end in ENDS:
        reply = rows[: end - 1] if form == "full" else rows[starts[-1] : end - 1]
        counts.append(len(reply))
        parts.append(decoder.decode(encoded(with_dense(reply)), end, starts[-1], request="r7"))
        starts.append(end - 1)
    return np.concatenate(parts), counts, starts[:-1]


def test_b01_both_reply_forms_merge_to_the_same_array():
    rows = rows_of(13)
    full, full_counts, starts = merged("full", rows)
    crop, crop_counts, _ = merged("crop", rows)
    assert (full_counts, crop_counts, starts) == ([4, 8, 13], [4, 4, 5], [0, 4, 8])
    assert full.tobytes() == crop.tobytes() == rows.astype(np.uint8).tobytes()
    assert full.shape == (13, 4, 2)


@pytest.mark.parametrize("count", [12, 17, 4, 6])
def test_b01_a_turn_of_another_row_count_is_refused(count):
    rows, decoder = rows_of(17), RouteDecoder(INFO, 6)
    decoder.decode(encoded(with_dense(rows[:4])), 5, request="r7")
    with pytest.raises(RouteError, match=rf"r8: expected 5 rows \(or all 13\) of 6 planes .*: {count} rows of"):
        decoder.decode(encoded(with_dense(rows[:count])), 14, 8, request="r8")
    np.testing.assert_array_equal(decoder.decode(encoded(with_dense(rows[:13])), 14, 8, request="r8"), rows[8:13])


@pytest.mark.parametrize("form", ["full", "crop"])
def test_b02_the_row_at_a_border_between_turns_is_that_of_the_later_turn(form):
    rows, decoder = rows_of(8), RouteDecoder(INFO, 6)
    first = decoder.decode(encoded(with_dense(rows[:4])), 5, request="r7")
    later = decoder.decode(encoded(with_dense(rows if form == "full" else rows[4:])), 9, 4, request="r7")
    assert (len(first), len(later)) == (4, 4)
    np.testing.assert_array_equal(later[0], rows[4])
