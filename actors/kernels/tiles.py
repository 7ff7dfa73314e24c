"""One kernel for every copy and every checksum of a handover: thousands of slices of any box in one launch.

A slice is a job: source, destination, and up to DIMS sizes and byte strides after neighbouring dims were collapsed, the
innermost first. Jobs are cut into tiles of TILE_NBYTES of the slice in row-major order and chunks of CHUNK_TILES; each
program takes equal runs of chunks, so that a launch is balanced however its slices differ in size. Where pointers,
runs and strides allow, 16 bytes a thread are loaded and stored at once; otherwise one word of 4, 2 or 1.

The sum of a slice is that of `sums.py`, which says why: its bytes in row-major order as 32-bit words, each times the
weight of its place in the tile, times a factor of the tile. LEFT sums what was loaded from the source. ARRIVED sums
what lies in the destination: a tile that was copied is read back, past the first-level cache, so from where every later
reader of the GPU gets it. It is in the second-level cache still, so that this costs nothing of the memory's bandwidth.

A row of the job table, int64: source, destination, number of units, bytes of a unit, numbers of the LEFT and of the
ARRIVED sum, then DIMS sizes in units, DIMS source strides and DIMS destination strides in bytes.
"""

# mypy: disallow-untyped-defs=False

import triton
import triton.language as tl

TILE_NBYTES = 32768
CHUNK_TILES = 16
WARPS = 32
"""A program fills a processor of the GPU, so that a launch of few programs leaves the other processors to NCCL."""
HEAD = 6
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
def _offset(job, unit, DIMS: tl.constexpr, END: tl.constexpr):  # noqa: N803
    """How far `unit` lies from the start of the source (END 0) or of the destination (END 1), in bytes."""
    rest = unit.to(tl.uint32)
    offset = tl.zeros_like(rest).to(tl.int64)
    for dim in tl.static_range(DIMS):
        index = rest
        if dim < DIMS - 1:
            size = tl.load(job + _HEAD + dim).to(tl.uint32)
            above = rest // size
            index = rest - above * size
            rest = above
        offset += index.to(tl.int64) * tl.load(job + _HEAD + (1 + END) * DIMS + dim)
    return offset


@triton.jit
def _addresses(job, start, count, width, DIMS: tl.constexpr, END: tl.constexpr):  # noqa: N803
    """Of the units from `start` on at one end, one a lane; divided only once where they lie in one run."""
    lane = tl.arange(0, _LANES)
    run = tl.load(job + _HEAD).to(tl.uint32)
    last = tl.minimum(start + _LANES, count) - 1
    if start.to(tl.uint32) // run == last.to(tl.uint32) // run:
        offsets = _offset(job, start, DIMS, END) + lane.to(tl.int64) * width
    else:
        offsets = _offset(job, start + lane, DIMS, END)
    return tl.load(job + END) + offsets


@triton.jit
def _quads(addresses):
    """Each 16-byte unit as four words side by side."""
    pointers = addresses.to(tl.pointer_type(tl.int32))[:, None] + tl.arange(0, 4)[None, :]
    return tl.multiple_of(tl.max_contiguous(pointers, [1, 4]), [1, 16])


@triton.jit
def _vectors(
    job,
    first,
    last,
    left,
    arrived,
    DIMS: tl.constexpr,  # noqa: N803
    COPY: tl.constexpr,  # noqa: N803
    LEFT: tl.constexpr,  # noqa: N803
    ARRIVED: tl.constexpr,  # noqa: N803
):
    """Tiles `first` to `last` of a job of 16-byte units, one a step; a tile is read back while the next is loaded."""
    count = tl.load(job + 2).to(tl.int32)
    lane = tl.arange(0, _LANES)
    quad = tl.arange(0, 4)
    weights = place_weight(lane[:, None] * 4 + quad[None, :])
    reads_back: tl.constexpr = COPY and ARRIVED
    written = lane.to(tl.int64)
    for number in range(first, last + (1 if reads_back else 0)):
        tile = _scalar(number)
        start = tile * _LANES
        mask = ((start + lane < count) & (tile < last))[:, None] & (quad >= 0)[None, :]
        data = tl.load(_quads(_addresses(job, start, count, 16, DIMS, 0)), mask=mask, other=0)
        if reads_back:
            # By the thread that wrote it, past the first-level cache.
            before = ((start - _LANES + lane < count) & (tile > first))[:, None] & (quad >= 0)[None, :]
            back = tl.load(_quads(written), mask=before, other=0, volatile=True)
        if COPY:
            written = _addresses(job, start, count, 16, DIMS, 1)
            tl.store(_quads(written), data, mask=mask)
        if LEFT:
            left += _sum_of_tile(data, weights, tile)
        if reads_back:
            arrived += _sum_of_tile(back, weights, tile - 1)
        elif ARRIVED:
            arrived += _sum_of_tile(data, weights, tile)
    return left, arrived


@triton.jit
def _sum_of_tile(data, weights, tile):
    words = data.to(tl.uint32, bitcast=True).to(tl.uint64)
    return tl.sum(words * weights, axis=1) * tile_factor(tile)


@triton.jit
def _words(
    job,
    first,
    last,
    left,
    arrived,
    DIMS: tl.constexpr,  # noqa: N803
    COPY: tl.constexpr,  # noqa: N803
    LEFT: tl.constexpr,  # noqa: N803
    ARRIVED: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
):
    """The same for a job of small units: memory that is not aligned, or not in runs."""
    kind: tl.constexpr = tl.int32 if WIDTH == 4 else (tl.int16 if WIDTH == 2 else tl.int8)
    bits: tl.constexpr = tl.uint32 if WIDTH == 4 else (tl.uint16 if WIDTH == 2 else tl.uint8)
    steps: tl.constexpr = _TILE_NBYTES // WIDTH // _LANES
    count = tl.load(job + 2).to(tl.int32)
    lane = tl.arange(0, _LANES)
    for number in range(first * steps, tl.minimum(last * steps, tl.cdiv(count, _LANES))):
        step = _scalar(number)
        start = step * _LANES
        mask = start + lane < count
        data = tl.load(_addresses(job, start, count, WIDTH, DIMS, 0).to(tl.pointer_type(kind)), mask=mask, other=0)
        # A unit is a part of a 32-bit word: it counts for what it adds to the word's value.
        place = (step % steps) * _LANES + lane
        weights = place_weight(place // (4 // WIDTH)) << ((place % (4 // WIDTH)) * (8 * WIDTH)).to(tl.uint64)
        weights *= tile_factor(step // steps)
        if LEFT:
            left += data.to(bits, bitcast=True).to(tl.uint64) * weights
        if COPY:
            into = _addresses(job, start, count, WIDTH, DIMS, 1).to(tl.pointer_type(kind))
            tl.store(into, data, mask=mask)
            if ARRIVED:
                data = tl.load(into, mask=mask, other=0, volatile=True)
        if ARRIVED:
            arrived += data.to(bits, bitcast=True).to(tl.uint64) * weights
    return left, arrived


@triton.jit
def _flush(jobs, row, sums, left, arrived, DIMS: tl.constexpr, LEFT: tl.constexpr, ARRIVED: tl.constexpr):  # noqa: N803
    job = jobs + row.to(tl.int64) * (_HEAD + 3 * DIMS)
    if LEFT:
        tl.atomic_add(sums + tl.load(job + 4), tl.sum(left, axis=0).to(tl.int64), sem="relaxed")
    if ARRIVED:
        tl.atomic_add(sums + tl.load(job + 5), tl.sum(arrived, axis=0).to(tl.int64), sem="relaxed")


@triton.jit
def _run_of_chunks(
    jobs,
    chunks,
    chunk_count,
    number,
    count,
    sums,
    DIMS: tl.constexpr,  # noqa: N803
    COPY: tl.constexpr,  # noqa: N803
    LEFT: tl.constexpr,  # noqa: N803
    ARRIVED: tl.constexpr,  # noqa: N803
):
    """Run `number` of `count`."""
    number = number.to(tl.int64)
    begin, end = number * chunk_count // count, (number + 1) * chunk_count // count
    row = tl.load(chunks + 2 * begin)
    left = tl.zeros([_LANES], tl.uint64)
    arrived = tl.zeros([_LANES], tl.uint64)
    for at in range(begin.to(tl.int32), end.to(tl.int32)):
        chunk = chunks + 2 * _scalar(at)
        # Lanes are added up once a job: it halts the whole program for as long as a chunk takes.
        if tl.load(chunk) != row:
            _flush(jobs, row, sums, left, arrived, DIMS, LEFT, ARRIVED)
            left = tl.zeros([_LANES], tl.uint64)
            arrived = tl.zeros([_LANES], tl.uint64)
            row = tl.load(chunk)
        job = jobs + row.to(tl.int64) * (_HEAD + 3 * DIMS)
        first = tl.load(chunk + 1)
        tiles = tl.cdiv(tl.load(job + 2) * tl.load(job + 3), _TILE_NBYTES)
        last = tl.minimum(first + _CHUNK_TILES, tiles.to(tl.int32))
        width = tl.load(job + 3)
        if width == 16:
            left, arrived = _vectors(job, first, last, left, arrived, DIMS, COPY, LEFT, ARRIVED)
        elif width == 4:
            left, arrived = _words(job, first, last, left, arrived, DIMS, COPY, LEFT, ARRIVED, 4)
        elif width == 2:
            left, arrived = _words(job, first, last, left, arrived, DIMS, COPY, LEFT, ARRIVED, 2)
        else:
            left, arrived = _words(job, first, last, left, arrived, DIMS, COPY, LEFT, ARRIVED, 1)
    _flush(jobs, row, sums, left, arrived, DIMS, LEFT, ARRIVED)


@triton.jit(do_not_specialize=["chunk_count", "ticket_count"])
def copy_and_sum(
    jobs,
    chunks,
    chunk_count,
    ticket,
    ticket_count,
    sums,
    DIMS: tl.constexpr,  # noqa: N803
    COPY: tl.constexpr,  # noqa: N803
    LEFT: tl.constexpr,  # noqa: N803
    ARRIVED: tl.constexpr,  # noqa: N803
    TICKETS: tl.constexpr,  # noqa: N803
):
    """Carry out the jobs. A chunk is a pair of int32: number of the job, and its first tile.

    A ticket is an equal run of chunks. With TICKETS, programs draw the next from `ticket`, so that a second launch
    takes over what the first has not begun; without, there is one for each program.
    """
    if TICKETS:
        number = tl.atomic_add(ticket, 1, sem="relaxed")
        while number < ticket_count:
            _run_of_chunks(jobs, chunks, chunk_count, number, ticket_count, sums, DIMS, COPY, LEFT, ARRIVED)
            number = tl.atomic_add(ticket, 1, sem="relaxed")
    else:
        number = tl.program_id(0)
        _run_of_chunks(jobs, chunks, chunk_count, number, tl.num_programs(0), sums, DIMS, COPY, LEFT, ARRIVED)
