"""Text as samples that are numbered over the whole run, so that each is seen once whatever the configuration."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from ray_etc.megatron.config import BatchConfig

TEXT_SUFFIXES = (".py", ".txt", ".md", ".rst", ".json", ".csv", ".html", ".c", ".h", ".cpp", ".rs", ".go", ".js", ".ts")
STANDARD_LIBRARY_NBYTES = 16 * 2**20


class Tokens(Protocol):
    """A flat row of token ids."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: slice, /) -> np.ndarray: ...


class _IndexedTokens:
    """The sequences of a Megatron indexed dataset, end to end."""

    def __init__(self, prefix: str) -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        self._dataset = IndexedDataset(prefix)
        self._stops = np.cumsum(self._dataset.sequence_lengths, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._stops[-1]) if len(self._stops) else 0

    def __getitem__(self, index: slice) -> np.ndarray:
        start, stop, _ = index.indices(len(self))
        parts = []
        sequence = int(np.searchsorted(self._stops, start, side="right"))
        while start < stop:
            sequence_start = int(self._stops[sequence]) - int(self._dataset.sequence_lengths[sequence])
            length = min(stop, int(self._stops[sequence])) - start
            if length:
                parts.append(self._dataset.get(sequence, offset=start - sequence_start, length=length))
            start, sequence = start + length, sequence + 1
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def open_tokens(path: str | Path | None = None) -> Tokens:
    """The tokens at `path`: bytes of a text file or of all text files in a folder, or Megatron's `.bin`/`.idx`.

    Without a path: the sources of Python's standard library, up to 16 MiB.
    """
    if path is None:
        library = Path(sysconfig.get_path("stdlib"))
        return _read_files(library, (".py",), skip=("site-packages", "dist-packages"), limit=STANDARD_LIBRARY_NBYTES)
    path = Path(path)
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    if all(prefix.with_name(prefix.name + suffix).is_file() for suffix in (".bin", ".idx")):
        return _IndexedTokens(str(prefix))
    if path.is_dir():
        return _read_files(path, TEXT_SUFFIXES)
    if not path.exists():
        raise FileNotFoundError(
            f"no data at {path}: give a text file, a folder of text files, or the prefix of a Megatron .bin/.idx pair"
        )
    return np.memmap(path, dtype=np.uint8, mode="r") if path.stat().st_size else np.empty(0, dtype=np.uint8)


def _read_files(
    folder: Path, suffixes: tuple[str, ...], skip: tuple[str, ...] = (), limit: int | None = None
) -> np.ndarray:
    files: list[str] = []
    for folder_within, subfolders, names in os.walk(folder):  # strings: as Path objects this took most of a build
        subfolders[:] = [name for name in subfolders if name not in skip]
        files += (os.path.join(folder_within, name) for name in names if os.path.splitext(name)[1] in suffixes)
    text = bytearray()
    for file in sorted(filter(os.path.isfile, files)):
        text += Path(file).read_bytes()
        if limit is not None and len(text) >= limit:
            break
    if not text:
        raise FileNotFoundError(f"no text files below {folder}: it needs some that end in {', '.join(suffixes)}")
    return np.frombuffer(bytes(text[:limit]), dtype=np.uint8)


class SampleLoader:
    """The samples of one data-parallel rank, by their number in the run.

    Sample `n` is window `n % windows` of epoch `n // windows`, in that epoch's own seeded order. A step takes the
    next global batch of numbers, and micro-batch `m` of data-parallel rank `d` those from
    `(m * data_parallel + d) * micro_batch_size` on, so a change of configuration moves samples between ranks but
    never skips or repeats one. The cursor, `consumed_samples`, is all there is to carry over.
    """

    def __init__(
        self,
        tokens: Tokens,
        sequence_length: int,
        vocab_size: int,
        batch: BatchConfig,
        *,
        data_index: int,
        data_parallel: int,
        seed: int,
    ) -> None:
        # A window has one token more than the model reads, because its targets are shifted by one.
        self.windows = max(0, (len(tokens) - 1) // sequence_length)
        if not self.windows:
            raise ValueError(
                f"the data has {len(tokens)} tokens; one sample of sequence_length={sequence_length} "
                f"needs {sequence_length + 1}"
            )
        self.consumed_samples = 0
        self._tokens = tokens
        self._sequence_length = sequence_length
        self._vocab_size = vocab_size
        self._batch = batch
        self._data_index = data_index
        self._data_parallel = data_parallel
        self._order = lru_cache(maxsize=2)(lambda epoch: np.random.default_rng((seed, epoch)).permutation(self.windows))

    def micro_batches(self) -> Iterator[tuple[list[int], torch.Tensor]]:
        """This rank's share of the next step: sample numbers, and tokens of [micro_batch, sequence_length + 1]."""
        size = self._batch.micro_batch_size
        whole = self._batch.size_after(self.consumed_samples)
        for first in range(self._data_index * size, whole, self._data_parallel * size):
            start = self.consumed_samples + first
            numbers = list(range(start, start + size))
            yield numbers, torch.from_numpy(np.stack([self.sample(number) for number in numbers]))

    def sample(self, number: int) -> np.ndarray:
        epoch, position = divmod(number, self.windows)
        start = int(self._order(epoch)[position]) * self._sequence_length
        tokens = self._tokens[start : start + self._sequence_length + 1].astype(np.int64)
        if tokens.max() >= self._vocab_size:
            raise ValueError(
                f"sample {number} has token {tokens.max()}, and vocab_size={self._vocab_size}; "
                f"use at least {tokens.max() + 1}"
            )
        return tokens

    def advance(self) -> None:
        """One step has been trained."""
        self.consumed_samples += self._batch.size_after(self.consumed_samples)

    def state_dict(self) -> dict[str, Any]:
        return {"consumed_samples": self.consumed_samples}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.consumed_samples = state_dict["consumed_samples"]
