"""One kernel for every copy and every checksum of a handover: thousands of slices of any box in one launch.

A slice is a job: source, destination, and up to DIMS sizes and byte strides after neighbouring dims were collapsed, the
innermost first. Jobs are cut into tiles of TILE_NBYTES of the slice in row-major order, tiles are handed out in chunks
of CHUNK_TILES, so that a launch is balanced however its slices differ in size. Where pointers, runs and strides allow,
16 bytes a thread are loaded and stored at once; otherwise one word of 4, 2 or 1.

The sum of a slice is that of `sums.py`, which says why: its bytes in row-major order as 32-bit words, each times
the weight of its place in the tile, times a factor of the tile. What is summed is what was loaded, so a job without
COPY proves what lies in memory.

A row of the job table, int64: source, destination, number of units, bytes of a unit, number of the sum, then DIMS sizes
in units, DIMS source strides and DIMS destination strides in bytes.
"""

# mypy: disallow-untyped-defs=False

import triton
import triton.language as tl

TILE_NBYTES = 65536
CHUNK_TILES = 2
WARPS = 32
"""A program fills a processor of the GPU, so that a launch of few programs leaves the other processors to NCCL."""
HEAD = 5
"""Entries of a row before its sizes."""

_TILE_NBYTES = tl.constexpr(TILE_NBYTES)
_CHUNK_TILES = tl.constexpr(CHUNK_TILES)
_HEAD = tl.constexpr(HEAD)
_LANES = tl.constexpr(TILE_NBYTES // 16)
"""Units that a program handles at once: a whole tile where a unit is 16 bytes."""


@triton.jit
def place_weight(place):
    """murmur3's 32-bit finalizer, from 1 on: distinct places get distinct weights, and none gets 0."""
    x = place.to(tl.uint32) + 1
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return (x ^ (x >> 16)).to(tl.uint64)


@triton.jit
def tile_factor(tile):
    """splitmix64 of the tile's number, made odd."""
    x = (tile.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return (x ^ (x >> 31)) | 1


@triton.jit
def _scalar(number):
    """A loop's number as Triton's int32: its interpreter counts in Python's."""
    return tl.zeros([], tl.int32) + number


@triton.jit
def _offsets(job, unit, DIMS: tl.constexpr):  # noqa: N803
    """How far `unit` lies from the start of the source and of the destination, in bytes."""
    rest = unit.to(tl.uint32)
    source = tl.zeros_like(rest).to(tl.int64)
    destination = tl.zeros_like(rest).to(tl.int64)
    for dim in tl.static_range(DIMS):
        index = rest
        if dim < DIMS - 1:
            size = tl.load(job + _HEAD + dim).to(tl.uint32)
            above = rest // size
            index = rest - above * size
            rest = above
        source += index.to(tl.int64) * tl.load(job + _HEAD + DIMS + dim)
        destination += index.to(tl.int64) * tl.load(job + _HEAD + 2 * DIMS + dim)
    return source, destination


@triton.jit
def _lane_offsets(job, start, count, width, DIMS: tl.constexpr):  # noqa: N803
    """Those of the units from `start` on, one a lane; divided only once where they lie in one run."""
    lane = tl.arange(0, _LANES)
    run = tl.load(job + _HEAD).to(tl.uint32)
    last = tl.minimum(start + _LANES, count) - 1
    if start.to(tl.uint32) // run == last.to(tl.uint32) // run:
        source, destination = _offsets(job, start, DIMS)
        sources = source + lane.to(tl.int64) * width
        destinations = destination + lane.to(tl.int64) * width
    else:
        sources, destinations = _offsets(job, start + lane, DIMS)
    return sources, destinations


@triton.jit
def _vectors(job, first, last, DIMS: tl.constexpr, COPY: tl.constexpr, SUM: tl.constexpr):  # noqa: N803
    """Tiles `first` to `last` of a job of 16-byte units; one step a tile."""
    source = tl.load(job)
    destination = tl.load(job + 1)
    count = tl.load(job + 2).to(tl.int32)
    lane = tl.arange(0, _LANES)
    quad = tl.arange(0, 4)
    weights = place_weight(lane[:, None] * 4 + quad[None, :])
    total = tl.zeros([_LANES], tl.uint64)
    for number in range(first, last):
        tile = _scalar(number)
        start = tile * _LANES
        sources, destinations = _lane_offsets(job, start, count, 16, DIMS)
        mask = (start + lane < count)[:, None] & (quad >= 0)[None, :]
        pointers = (source + sources).to(tl.pointer_type(tl.int32))[:, None] + quad[None, :]
        pointers = tl.multiple_of(tl.max_contiguous(pointers, [1, 4]), [1, 16])
        data = tl.load(pointers, mask=mask, other=0)
        if COPY:
            pointers = (destination + destinations).to(tl.pointer_type(tl.int32))[:, None] + quad[None, :]
            pointers = tl.multiple_of(tl.max_contiguous(pointers, [1, 4]), [1, 16])
            tl.store(pointers, data, mask=mask)
        if SUM:
            words = data.to(tl.uint32, bitcast=True).to(tl.uint64)
            total += tl.sum(words * weights, axis=1) * tile_factor(tile)
    return tl.sum(total, axis=0)


@triton.jit
def _words(job, first, last, DIMS: tl.constexpr, COPY: tl.constexpr, SUM: tl.constexpr, WIDTH: tl.constexpr):  # noqa: N803
    """Tiles `first` to `last` of a job of small units: memory that is not aligned, or not in runs."""
    kind: tl.constexpr = tl.int32 if WIDTH == 4 else (tl.int16 if WIDTH == 2 else tl.int8)
    bits: tl.constexpr = tl.uint32 if WIDTH == 4 else (tl.uint16 if WIDTH == 2 else tl.uint8)
    steps: tl.constexpr = _TILE_NBYTES // WIDTH // _LANES
    source = tl.load(job)
    destination = tl.load(job + 1)
    count = tl.load(job + 2).to(tl.int32)
    lane = tl.arange(0, _LANES)
    total = tl.zeros([_LANES], tl.uint64)
    for number in range(first * steps, tl.minimum(last * steps, tl.cdiv(count, _LANES))):
        step = _scalar(number)
        start = step * _LANES
        mask = start + lane < count
        sources, destinations = _lane_offsets(job, start, count, WIDTH, DIMS)
        data = tl.load((source + sources).to(tl.pointer_type(kind)), mask=mask, other=0)
        if COPY:
            tl.store((destination + destinations).to(tl.pointer_type(kind)), data, mask=mask)
        if SUM:
            # A unit is a part of a 32-bit word: it counts for what it adds to the word's value.
            place = (step % steps) * _LANES + lane
            shift = (place % (4 // WIDTH)) * (8 * WIDTH)
            words = data.to(bits, bitcast=True).to(tl.uint64) << shift.to(tl.uint64)
            total += words * place_weight(place // (4 // WIDTH)) * tile_factor(step // steps)
    return tl.sum(total, axis=0)


@triton.jit(do_not_specialize=["chunk_count"])
def copy_and_sum(
    jobs,
    chunks,
    chunk_count,
    sums,
    DIMS: tl.constexpr,  # noqa: N803
    COPY: tl.constexpr,  # noqa: N803
    SUM: tl.constexpr,  # noqa: N803
):
    """Carry out the jobs. A chunk is a pair of int32: number of the job, and its first tile."""
    for number in range(tl.program_id(0), chunk_count, tl.num_programs(0)):
        chunk = _scalar(number)
        job = jobs + tl.load(chunks + 2 * chunk).to(tl.int64) * (_HEAD + 3 * DIMS)
        first = tl.load(chunks + 2 * chunk + 1)
        width = tl.load(job + 3)
        tiles = tl.cdiv(tl.load(job + 2) * width, _TILE_NBYTES)
        last = tl.minimum(first + _CHUNK_TILES, tiles.to(tl.int32))
        total = tl.zeros([], tl.uint64)
        if width == 16:
            total = _vectors(job, first, last, DIMS, COPY, SUM)
        elif width == 4:
            total = _words(job, first, last, DIMS, COPY, SUM, 4)
        elif width == 2:
            total = _words(job, first, last, DIMS, COPY, SUM, 2)
        else:
            total = _words(job, first, last, DIMS, COPY, SUM, 1)
        if SUM:
            tl.atomic_add(sums + tl.load(job + 4), total.to(tl.int64), sem="relaxed")
