from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ray_etc.actors import sums
from ray_etc.actors.certificate import checksums

DTYPES = [
    torch.uint8,
    torch.bool,
    torch.int16,
    torch.bfloat16,
    torch.float32,
    torch.int64,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
]
LAYOUTS = ["contiguous", "transposed", "strided", "offset"]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 8 words, 2 at a time, so that small slices cross their borders."""
    monkeypatch.setattr(sums, "TILE_WORDS", 8)
    monkeypatch.setattr(sums, "TILES_AT_ONCE", 2)


def checksum(tensor: torch.Tensor) -> int:
    return int(checksums([tensor])[0])


def laid_out(values: torch.Tensor, how: str) -> torch.Tensor:
    """The same values in memory of another shape."""
    if how == "transposed" and values.dim() > 1:
        return values.transpose(0, -1).contiguous().transpose(0, -1)
    room = torch.zeros([2 * n + 3 for n in values.shape], dtype=values.dtype)
    view = room[tuple(slice(1, 1 + 2 * n, 2) if how == "strided" else slice(2, 2 + n) for n in values.shape)]
    view.copy_(values)
    return view if how != "contiguous" else values.contiguous()


@st.composite
def slices(draw: st.DrawFn, min_numel: int = 0) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 6), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    count = int(np.prod(shape, dtype=int))
    assume(count >= min_numel)
    raw = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    if dtype == torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if count else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)


@settings(max_examples=200)
@given(slices(), st.sampled_from(LAYOUTS))
def test_sum_is_that_of_the_logical_order_whatever_the_strides(values: torch.Tensor, how: str) -> None:
    assert checksum(laid_out(values, how)) == checksum(values)


@settings(max_examples=200)
@given(slices(min_numel=1), st.data())
def test_one_flipped_bit_changes_the_sum(values: torch.Tensor, data: st.DataObject) -> None:
    damaged = values.clone()
    octets = damaged.reshape(-1).view(torch.uint8)
    octets[data.draw(st.integers(0, octets.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assume(values.dtype != torch.bool or int(octets.max()) <= 1)
    assert checksum(damaged) != checksum(values)


@settings(max_examples=200)
@given(slices(min_numel=2), st.data())
def test_two_swapped_elements_change_the_sum(values: torch.Tensor, data: st.DataObject) -> None:
    i, j = (data.draw(st.integers(0, values.numel() - 1)) for _ in range(2))
    swapped = values.clone().reshape(-1)
    swapped[[i, j]] = swapped[[j, i]]
    assume(not torch.equal(swapped.view(torch.uint8), values.reshape(-1).view(torch.uint8)))
    assert checksum(swapped.reshape(values.shape)) != checksum(values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_swapped_signs_of_zero_change_the_sum(dtype: torch.dtype) -> None:
    """The elements differ in their top bit only, which makes the weakest weights: all of them must differ still."""
    sums = set()
    for position in range(40):
        values = torch.zeros(40, dtype=dtype)
        values[position] = -0.0
        sums.add(checksum(values))
    assert len(sums) == 40


def test_zeros_of_another_size_or_none_at_all_have_another_sum() -> None:
    sums = [checksum(torch.zeros(n)) for n in range(30)]
    assert len(set(sums)) == 30
    assert 0 not in sums


def test_two_swapped_slices_are_told_apart_move_by_move() -> None:
    a, b = torch.arange(6.0), torch.arange(6.0, 12.0)
    assert checksums([a, b]).tolist() == checksums([b, a])[::-1].tolist()
    assert (checksums([a, b]) != checksums([b, a])).all()


def test_sum_is_that_of_its_definition_word_by_word() -> None:
    values = torch.randint(-(2**31), 2**31, (37,), dtype=torch.int32)
    weights = sums.place_weights(8).tolist()
    factors = (sums.mix(np.arange(5, dtype=np.uint64)) | np.uint64(1)).tolist()
    total = sum(
        (word & 0xFFFFFFFF) * weights[place % 8] * factors[place // 8] for place, word in enumerate(values.tolist())
    )
    [size] = sums.mix(np.array([37 * 4 + 2**32], dtype=np.uint64)).tolist()
    assert checksum(values) == (total + size) % 2**64
    assert checksum(values.reshape(1, 37)) == checksum(values)


def test_weights_within_a_tile_are_distinct_32_bit_numbers() -> None:
    weights = sums.place_weights(1 << 14)
    assert len(np.unique(weights)) == 1 << 14
    assert weights.min() > 0
    assert weights.max() < 1 << 32


@pytest.mark.parametrize("numel", [1 << 14, (1 << 14) + 1, 3 << 14, 1_500_007])
def test_tiles_of_their_real_size(monkeypatch: pytest.MonkeyPatch, numel: int) -> None:
    values = torch.randint(-(2**31), 2**31, (numel,), dtype=torch.int32)
    monkeypatch.undo()
    whole = checksum(values)
    values[-1] += 1
    assert checksum(values) != whole


def test_parameters_that_require_gradients_have_a_sum() -> None:
    parameter = torch.nn.Parameter(torch.randn(4, 4))
    assert checksum(parameter) == checksum(parameter.detach().clone())


def test_no_slices_no_sums() -> None:
    assert checksums([]).shape == (0,)
