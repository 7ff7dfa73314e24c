"""Samples are numbered over the run: each once and in order, whatever the configuration."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ray_etc.megatron.config import BatchConfig
from ray_etc.megatron.data import STANDARD_LIBRARY_NBYTES, SampleLoader, open_tokens

BATCH = BatchConfig(global_batch_size=8, micro_batch_size=2)


def loader(data_index: int = 0, data_parallel: int = 1, *, num_tokens: int = 161, seed: int = 3) -> SampleLoader:
    tokens = np.arange(num_tokens) % 256
    return SampleLoader(tokens, 4, 256, BATCH, data_index=data_index, data_parallel=data_parallel, seed=seed)


def one_step(loaders: list[SampleLoader]) -> list[int]:
    """The samples of all data-parallel ranks, by micro-batch and then by rank, as their numbers say they come."""
    shares = [list(each.micro_batches()) for each in loaders]
    for each in loaders:
        each.advance()
    return [number for micro in zip(*shares, strict=True) for numbers, _ in micro for number in numbers]


@pytest.mark.parametrize("data_parallel", [1, 2, 4])
def test_each_sample_once_and_in_order(data_parallel: int) -> None:
    loaders = [loader(index, data_parallel) for index in range(data_parallel)]
    assert [number for _ in range(5) for number in one_step(loaders)] == list(range(40))


def test_dp1_to_dp4_to_dp2() -> None:
    cursor = {"consumed_samples": 0}
    seen: list[int] = []
    for data_parallel in (1, 4, 2):
        loaders = [loader(index, data_parallel) for index in range(data_parallel)]
        for each in loaders:
            each.load_state_dict(cursor)
        seen += one_step(loaders) + one_step(loaders)
        cursor = loaders[0].state_dict()
    assert seen == list(range(48))


def test_an_epoch_has_each_window_once_and_the_next_another_order() -> None:
    it = loader()
    assert it.windows == 40
    epochs = [[int(it.sample(n)[0]) for n in range(first, first + 40)] for first in (0, 40)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(0, 160, 4))
    assert epochs[0] != epochs[1]
    assert epochs[0] == [int(loader(1, 2).sample(n)[0]) for n in range(40)]
    assert epochs[0] != [int(loader(seed=4).sample(n)[0]) for n in range(40)]


def test_a_batch_spans_two_epochs() -> None:
    it = loader(num_tokens=21)  # five windows: a step of eight takes all of them and three of the next epoch
    first_tokens = [int(row[0]) for _, rows in it.micro_batches() for row in rows]
    assert set(first_tokens[:5]) == {0, 4, 8, 12, 16}
    assert len(set(first_tokens[5:])) == 3


def test_a_text_file_and_a_folder(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.py").write_text("first ")
    (tmp_path / "picture.png").write_bytes(b"no text")
    assert bytes(open_tokens(tmp_path)[:].tolist()) == b"first second"
    assert bytes(open_tokens(str(tmp_path / "b.txt"))[:].tolist()) == b"second"


def test_the_standard_library_by_default() -> None:
    tokens = open_tokens()
    assert 2**20 < len(tokens) <= STANDARD_LIBRARY_NBYTES
    assert np.array_equal(tokens[:1000], open_tokens()[:1000])


def test_an_indexed_dataset(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "text.bin"), dtype=np.uint16)
    for document in ([1, 2, 3], [400], [5, 6, 7, 8]):
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(str(tmp_path / "text.idx"))
    for path in (tmp_path / "text", tmp_path / "text.bin", tmp_path / "text.idx"):
        tokens = open_tokens(path)
        assert len(tokens) == 8
        assert tokens[2:6].tolist() == [3, 400, 5, 6]
        assert tokens[0:8].tolist() == [1, 2, 3, 400, 5, 6, 7, 8]
    it = SampleLoader(open_tokens(tmp_path / "text"), 7, 256, BATCH, data_index=0, data_parallel=1, seed=0)
    with pytest.raises(ValueError, match=r"^sample 0 has token 400, and vocab_size=256; use at least 401$"):
        it.sample(0)


def test_data_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=rf"^no data at {tmp_path}/gone: give a text file, a folder[^\n]*$"):
        open_tokens(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match=rf"^no text files below {tmp_path}: [^\n]*$"):
        open_tokens(tmp_path)


def test_data_shorter_than_a_sample() -> None:
    with pytest.raises(ValueError, match=r"^the data has 4 tokens; one sample of sequence_length=4 needs 5$"):
        loader(num_tokens=4)
