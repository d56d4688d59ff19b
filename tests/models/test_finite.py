"""One pass finds every value that is not finite."""

import pytest
import torch

from asyncrl.models.finite import is_finite

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_bad_value_is_found_wherever_it_is(dtype: torch.dtype):
    # Odd sizes: the last elements do not fill a vector register.
    for size in (1, 2, 7, 33, 131):
        good = torch.linspace(-3.0, 3.0, size).to(dtype)
        assert is_finite(good)
        for position in range(size):
            for bad in (torch.nan, -torch.nan, torch.inf, -torch.inf):
                broken = good.clone()
                broken[position] = bad
                assert not is_finite(broken)
                # Not contiguous: another way to look.
                assert not is_finite(broken.repeat(2, 1).T) and is_finite(good.repeat(2, 1).T)
    assert is_finite(torch.zeros(0, 3, dtype=dtype)) and is_finite(torch.tensor([1, 2]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_values_and_every_block_count(dtype: torch.dtype):
    info = torch.finfo(dtype)
    assert is_finite(torch.tensor([info.max, info.min, info.tiny, -info.tiny, -0.0], dtype=dtype))
    many = torch.zeros(2**18 + 2, dtype=dtype)
    for position in (0, 2**18 - 1, 2**18, 2**18 + 1):
        many[position] = -torch.inf
        assert not is_finite(many.view(2, -1)), position
        many[position] = info.min
        assert is_finite(many.view(2, -1))
