import pytest
import torch

from asyncrl.errors import WeightSyncError
from asyncrl.types import Version
from asyncrl.weights import shm
from asyncrl.weights.fp8 import LARGEST, dequantise, quantise, scale_shape


def test_numbers_by_hand():
    weight = torch.tensor([[448.0, -224.0, 1.0, 1.0625]])
    data, scale = quantise(weight)
    assert scale.tolist() == [[1.0]]
    # 3 bits after the point: between 1 and 1.125 the tie goes to the even one.
    assert data.float().tolist() == [[448.0, -224.0, 1.0, 1.0]]
    data, scale = quantise(weight / 4)
    assert scale.tolist() == [[0.25]] and data.float().tolist() == [[448.0, -224.0, 1.0, 1.0]]
    assert dequantise(data, scale, torch.float32).tolist() == [[112.0, -56.0, 0.25, 0.25]]


def test_a_block_is_128_by_128_and_the_last_ones_are_smaller():
    weight = torch.ones(130, 300)
    weight[128:, 256:] = 5.0
    data, scale = quantise(weight)
    assert data.dtype == torch.float8_e4m3fn and data.shape == (130, 300)
    assert scale.dtype == torch.float32 and scale.shape == (2, 3) == scale_shape((130, 300))
    expected = torch.full((2, 3), 1 / LARGEST)
    expected[1, 2] = 5 / LARGEST
    assert torch.equal(scale, expected)
    assert torch.allclose(dequantise(data, scale, torch.float32), weight, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_error_is_at_most_half_a_step(dtype):
    weight = torch.randn(200, 150, generator=torch.Generator().manual_seed(0)).to(dtype)
    data, scale = quantise(weight)
    back = dequantise(data, scale, torch.float32)
    step = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :150]
    # Half a step of 3 bits; under 2^-6 the steps are 2^-9, all times the scale.
    bound = torch.maximum(weight.float().abs() / 16, step * 2**-10) * (1 + 1e-6)
    assert bool(((back - weight.float()).abs() <= bound).all())
    assert float((back - weight.float()).abs().max()) > 1e-3


def test_what_fp8_holds_comes_back_exactly():
    grid = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    grid = grid[torch.isfinite(grid)].repeat(4)[:1000].view(8, 125)
    for factor in (1.0, 2.0**-7):
        data, scale = quantise(grid * factor)
        assert torch.equal(dequantise(data, scale, torch.float32), grid * factor)


def test_zeros_and_the_smallest_numbers_stay_finite():
    weight = torch.zeros(256, 128)
    weight[200, 3] = 1e-45  # its quotient by 448 is zero
    data, scale = quantise(weight)
    assert scale.tolist() == [[1.0], [1.0]]
    assert torch.equal(dequantise(data, scale, torch.float32), torch.zeros(256, 128))
    data, scale = quantise(torch.full((2, 2), 3e38))
    assert torch.isfinite(dequantise(data, scale, torch.float32)).all()


def test_what_is_no_matrix_or_not_finite_is_refused():
    with pytest.raises(WeightSyncError, match=r"need a matrix of floats, got torch.float32 of shape \(3,\)"):
        quantise(torch.ones(3))
    with pytest.raises(WeightSyncError, match="int64"):
        quantise(torch.ones(3, 3, dtype=torch.int64))
    for bad in (float("nan"), float("inf")):
        with pytest.raises(WeightSyncError, match="non-finite"):
            quantise(torch.tensor([[1.0, bad]]))


def test_shm_carries_it(tmp_path):
    publisher = shm.Publisher(tmp_path / "weights")
    data, scale = quantise(torch.randn(130, 130, generator=torch.Generator().manual_seed(0)))
    source = publisher.publish(Version(0, 0), [("w.weight", data), ("w.weight_scale_inv", scale)])
    back = shm.read(source, Version(0, 0))
    assert back["w.weight"].dtype == torch.float8_e4m3fn
    assert torch.equal(back["w.weight"].view(torch.uint8), data.view(torch.uint8))
    assert torch.equal(back["w.weight_scale_inv"], scale)
    del back
    publisher.close()
