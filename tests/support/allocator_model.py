"""A reference model of the caching allocator in plain Python: slow, but short enough to verify by reading.

Lookups scan all blocks, and statistics are computed from the existing blocks. Addresses come from the real allocator
(`Segment.base`), because blocks of equal size are used in address order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

KIB = 1024
MIB = 1024 * KIB

MIN_BLOCK = 512
SMALL_SIZE = 1 * MIB  # the largest request of the small pool
SMALL_SEGMENT = 2 * MIB
MIN_LARGE = 10 * MIB  # requests of at least this size get a segment of their rounded size
ROUND_LARGE = 2 * MIB
NO_LIMIT = 1 << 62

PoolId = tuple[int, int]
DEFAULT_POOL: PoolId = (0, 0)


class ModelOutOfMemory(Exception):
    """No free block fits, and no segment can be allocated after releasing cached memory."""


@dataclass
class Settings:
    max_split_size: int = NO_LIMIT
    max_non_split_rounding: int = 20 * MIB
    large_segment: int = 20 * MIB
    garbage_collection_threshold: float = 0.0
    roundup_divisions: int = 0  # the same for all sizes
    expandable: bool = False


@dataclass(eq=False)
class Pool:
    """One half (small or large) of the device's default pool or of a private pool."""

    id: PoolId
    small: bool
    searches: int = 0


@dataclass(eq=False)
class PrivatePool:
    small: Pool
    large: Pool
    use_count: int = 0
    use_on_oom: bool = False
    no_split: bool = False


@dataclass(eq=False)
class Segment:
    size: int
    pool: Pool
    stream: int
    page: int = 0  # expandable segments: unit of mapping; other segments: 0
    base: int | None = None  # address; None until the real allocator has returned it
    blocks: list[Block] = field(default_factory=list)  # sorted by offset; they cover the segment


@dataclass(eq=False)
class Block:
    segment: Segment
    offset: int
    size: int
    mapped: bool = True
    allocated: bool = False
    requested: int = 0
    stream_uses: list[int] = field(default_factory=list)
    pending_events: int = 0
    free_since: int = 0

    @property
    def address(self) -> int:
        assert self.segment.base is not None
        return self.segment.base + self.offset

    @property
    def is_free(self) -> bool:
        return not self.allocated and not self.stream_uses and not self.pending_events

    @property
    def is_split(self) -> bool:
        return len(self.segment.blocks) > 1

    def neighbour(self, step: int) -> Block | None:
        index = self.segment.blocks.index(self) + step
        return self.segment.blocks[index] if 0 <= index < len(self.segment.blocks) else None


@dataclass
class Event:
    stream: int
    block: Block
    reached: bool


class AllocatorModel:
    """The allocator of one device with `capacity` bytes, of which `fraction` can be used."""

    def __init__(self, capacity: int, settings: Settings, fraction: float = 1.0) -> None:
        self.capacity = capacity
        self.allowed = int(fraction * capacity)
        self.settings = settings
        self.small = Pool(DEFAULT_POOL, small=True)
        self.large = Pool(DEFAULT_POOL, small=False)
        self.private: dict[PoolId, PrivatePool] = {}
        self.active_pools: list[PoolId] = []
        self.segments: list[Segment] = []
        self.events: list[Event] = []
        self.held: set[int] = set()  # streams with work that is pending until `open`
        self.waited_for: set[int] = set()  # held streams that the last call waited for
        self.retries = 0
        self.ooms = 0

    # --- streams -----------------------------------------------------------------------------------------------------

    def hold(self, stream: int) -> None:
        self.held.add(stream)

    def open(self, stream: int) -> None:
        self.held.discard(stream)
        for event in self.events:
            if event.stream == stream:
                event.reached = True

    def process_events(self) -> None:
        """Frees blocks whose events have completed. A stream completes its events in order."""
        for event in [event for event in self.events if event.reached]:
            self.complete(event)

    def synchronize_events(self) -> None:
        for event in list(self.events):
            if event.stream in self.held:
                self.waited_for.add(event.stream)
                self.open(event.stream)
            self.complete(event)

    def complete(self, event: Event) -> None:
        self.events.remove(event)
        event.block.pending_events -= 1
        if not event.block.pending_events:
            self.make_free(event.block)

    # --- requests ----------------------------------------------------------------------------------------------------

    def allocate(self, requested: int, stream: int) -> Block:
        self.waited_for = set()
        self.process_events()
        size = self.round_size(requested)
        pool = self.pool_for(size)
        block = self.find_free(pool, stream, size, count=True) or self.obtain(pool, stream, size)
        if block is None:
            self.ooms += 1
            raise ModelOutOfMemory
        if self.should_split(block, size):
            self.cut(block, size).free_since = block.segment.pool.searches
        block.allocated = True
        block.requested = requested
        return block

    def round_size(self, size: int) -> int:
        if size < MIN_BLOCK:
            return MIN_BLOCK
        divisions = self.settings.roundup_divisions
        if divisions > 1 and size > MIN_BLOCK * divisions:
            floor = 1 << (size.bit_length() - 1)
            return size if size == floor else round_up(size, floor // divisions)
        return round_up(size, MIN_BLOCK)

    def pool_for(self, size: int) -> Pool:
        if self.active_pools:
            private = self.private[self.active_pools[-1]]
            return private.small if size <= SMALL_SIZE else private.large
        return self.small if size <= SMALL_SIZE else self.large

    def segment_size(self, size: int) -> int:
        if size <= SMALL_SIZE:
            return SMALL_SEGMENT
        return self.settings.large_segment if size < MIN_LARGE else round_up(size, ROUND_LARGE)

    def blocks(self) -> list[Block]:
        return [block for segment in self.segments for block in segment.blocks]

    def free_blocks(self, pool: Pool, stream: int) -> list[Block]:
        """Free blocks in best-fit order: by size, then by address."""
        mine = [segment for segment in self.segments if segment.pool is pool and segment.stream == stream]
        free = [block for segment in mine for block in segment.blocks if block.is_free and block.mapped]
        return sorted(free, key=lambda block: (block.size, block.address))

    def find_free(self, pool: Pool, stream: int, size: int, count: bool) -> Block | None:
        if count and self.settings.garbage_collection_threshold > 0:
            pool.searches += 1
        fitting = [block for block in self.free_blocks(pool, stream) if block.size >= size]
        if fitting and fitting[0].segment.page and not self.settings.expandable:
            fitting = [block for block in fitting if not block.segment.page]
        if not fitting:
            return None
        block = fitting[0]
        for following in fitting[1:]:
            # Prefer a block with less unmapped memory after it, so that the segment's end can still grow.
            if not block.segment.page or self.reach(following) >= self.reach(block):
                break
            block = following
        limit = self.settings.max_split_size
        if size < limit <= block.size:
            return None
        if size >= limit and block.size >= size + self.settings.max_non_split_rounding:
            return None
        return block

    def reach(self, block: Block) -> int:
        following = block.neighbour(+1)
        return block.size + (following.size if following and not following.mapped else 0)

    def should_split(self, block: Block, size: int) -> bool:
        pool = block.segment.pool
        if pool.id != DEFAULT_POOL and self.private[pool.id].no_split:
            return False
        if pool.small or self.settings.expandable:
            return block.size - size >= MIN_BLOCK
        return size < self.settings.max_split_size and block.size - size > SMALL_SIZE

    def cut(self, block: Block, size: int) -> Block:
        """Shortens a block to `size` and returns a new block for the rest."""
        rest = Block(block.segment, block.offset + size, block.size - size, block.mapped)
        block.segment.blocks.insert(block.segment.blocks.index(block) + 1, rest)
        block.size = size
        return rest

    # --- frees -------------------------------------------------------------------------------------------------------

    def record_stream(self, block: Block, stream: int) -> None:
        if stream != block.segment.stream and stream not in block.stream_uses:
            block.stream_uses.append(stream)

    def free(self, block: Block) -> None:
        block.allocated = False
        streams, block.stream_uses = block.stream_uses, []
        for stream in streams:
            block.pending_events += 1
            self.events.append(Event(stream, block, reached=stream not in self.held))
        if not streams:
            self.make_free(block)

    def make_free(self, block: Block) -> None:
        block.requested = 0
        self.merge(block).free_since = block.segment.pool.searches

    def merge(self, block: Block) -> Block:
        """Merges a free block with its free neighbours; the leftmost block remains."""
        for left, right in ((block.neighbour(-1), block), (block, block.neighbour(+1))):
            if left and right and left.is_free and right.is_free and left.mapped == right.mapped:
                left.size += right.size
                left.segment.blocks.remove(right)
                if right is block:
                    return self.merge(left)
        return block

    # --- segments ----------------------------------------------------------------------------------------------------

    @property
    def reserved(self) -> int:
        return sum(block.size for block in self.blocks() if block.mapped)

    def obtain(self, pool: Pool, stream: int, size: int) -> Block | None:
        if self.settings.garbage_collection_threshold > 0:
            self.collect_garbage()
        block = self.new_segment(pool, stream, size)
        if block is None and self.release_oversize(pool, stream, size):
            block = self.new_segment(pool, stream, size)
        if block is None:
            self.retries += 1
            self.release_cached(lambda pool: pool.id == DEFAULT_POOL or not self.private[pool.id].use_count)
            block = self.new_segment(pool, stream, size)
        return block or self.find_free(pool, stream, size, count=False) or self.last_resort(pool, stream, size)

    def new_segment(self, pool: Pool, stream: int, size: int) -> Block | None:
        segment_size = self.segment_size(size)
        if self.reserved + segment_size > self.allowed:
            return None
        if self.settings.expandable:
            return self.expand(pool, stream, size)
        if self.reserved + segment_size > self.capacity:
            return None
        segment = Segment(segment_size, pool, stream)
        segment.blocks = [Block(segment, 0, segment_size)]
        self.segments.append(segment)
        return segment.blocks[0]

    def unsplit_free_segments(self, pool: Pool) -> list[Segment]:
        return [
            segment
            for segment in self.segments
            if segment.pool is pool and not segment.page and len(segment.blocks) == 1 and segment.blocks[0].is_free
        ]

    def collect_garbage(self) -> None:
        threshold = int(self.settings.garbage_collection_threshold * self.allowed)
        target = self.reserved - threshold
        candidates = self.unsplit_free_segments(self.large)
        reclaimed = 0
        while candidates and reclaimed < target:
            ages = {id(segment): self.large.searches - segment.blocks[0].free_since for segment in candidates}
            mean = sum(ages.values()) / len(ages)
            for segment in [segment for segment in candidates if ages[id(segment)] >= mean]:
                reclaimed += segment.size
                candidates.remove(segment)
                self.segments.remove(segment)

    def release_oversize(self, pool: Pool, stream: int, size: int) -> bool:
        limit = self.settings.max_split_size
        if limit == NO_LIMIT:
            return False
        wanted = max(size, limit)
        free = self.free_blocks(pool, stream)
        fitting = [block for block in free if block.size >= wanted][:1]
        if fitting and (fitting[0].is_split or fitting[0].segment.page):
            return False
        released = 0
        for block in fitting or reversed(free):
            if released >= wanted or block.size < limit or block.is_split or block.segment.page:
                break
            released += block.size
            self.segments.remove(block.segment)
        return released >= wanted

    def release_cached(self, selected: object) -> None:
        assert callable(selected)
        self.synchronize_events()
        for segment in [s for pool in self.pools() if selected(pool) for s in self.unsplit_free_segments(pool)]:
            self.segments.remove(segment)
        self.unmap_free_pages(selected)
        for pool_id, private in list(self.private.items()):
            used = any(segment.pool.id == pool_id for segment in self.segments)
            if not private.use_count and not used:
                del self.private[pool_id]

    def pools(self) -> list[Pool]:
        private = [pool for one in self.private.values() for pool in (one.small, one.large)]
        return [self.small, self.large, *private]

    def last_resort(self, pool: Pool, stream: int, size: int) -> Block | None:
        if pool.id != DEFAULT_POOL:
            return None
        for _, private in sorted(self.private.items()):
            if private.use_on_oom:
                block = self.find_free(private.small if pool.small else private.large, stream, size, count=False)
                if block:
                    return block
        return None

    def empty_cache(self, only: PoolId = DEFAULT_POOL) -> None:
        self.waited_for = set()
        self.release_cached(
            lambda pool: (
                (only == DEFAULT_POOL)
                if pool.id == DEFAULT_POOL
                else not self.private[pool.id].use_count and only in (DEFAULT_POOL, pool.id)
            )
        )

    # --- expandable segments -----------------------------------------------------------------------------------------

    def expand(self, pool: Pool, stream: int, size: int) -> Block | None:
        start = self.find_room(pool, stream, size)
        fresh = start is None
        if start is None:
            page = SMALL_SEGMENT if pool.small else self.settings.large_segment
            segment = Segment(round_up(max(self.capacity * 9 // 8, size), page), pool, stream, page)
            start = Block(segment, 0, segment.size, mapped=False)
            segment.blocks = [start]
            self.segments.append(segment)
        segment = start.segment
        run: list[Block] = []
        room = 0
        at = start
        while room < size:
            if not at.mapped:
                needed = round_up(size - room, segment.page)
                if needed < at.size:
                    self.cut(at, needed)
            run.append(at)
            room += at.size
            following = at.neighbour(+1)
            at = following if following else at
        to_map = [block for block in run if not block.mapped]
        if self.reserved + sum(block.size for block in to_map) > self.capacity:
            if fresh:
                self.segments.remove(segment)
            else:
                self.merge(to_map[-1])
            return None
        for block in to_map:
            block.mapped = True
            self.merge(block)
        return next(block for block in segment.blocks if block.offset <= start.offset < block.offset + block.size)

    def find_room(self, pool: Pool, stream: int, size: int) -> Block | None:
        mine = [segment for segment in self.segments if segment.pool is pool and segment.stream == stream]
        unmapped = [block for segment in mine for block in segment.blocks if not block.mapped]
        for block in sorted(unmapped, key=lambda block: block.address):
            before = block.neighbour(-1)
            start: Block | None = before if before and before.is_free else block
            at, room = start, 0
            while at and at.is_free and room < size:
                room += at.size
                at = at.neighbour(+1)
            if room >= size:
                return start
        return None

    def unmap_free_pages(self, selected: object) -> None:
        assert callable(selected)
        for segment in [segment for segment in self.segments if segment.page and selected(segment.pool)]:
            for block in [block for block in segment.blocks if block.mapped and block.is_free]:
                first = round_up(block.offset, segment.page)
                last = (block.offset + block.size) // segment.page * segment.page
                if first >= last:
                    continue
                if last < block.offset + block.size:
                    self.cut(block, last - block.offset).free_since = segment.pool.searches
                if first > block.offset:
                    block.free_since = segment.pool.searches
                    block = self.cut(block, first - block.offset)
                block.mapped = False
                self.merge(block)
            if len(segment.blocks) == 1 and not segment.blocks[0].mapped:
                self.segments.remove(segment)

    # --- private pools -----------------------------------------------------------------------------------------------

    def create_pool(self, pool_id: PoolId, use_on_oom: bool = False, no_split: bool = False) -> None:
        self.private[pool_id] = PrivatePool(Pool(pool_id, True), Pool(pool_id, False), 1, use_on_oom, no_split)

    def begin_allocate_to_pool(self, pool_id: PoolId) -> None:
        self.private[pool_id].use_count += 1
        self.active_pools.append(pool_id)

    def end_allocate_to_pool(self) -> None:
        self.private[self.active_pools.pop()].use_count -= 1

    def release_pool(self, pool_id: PoolId) -> None:
        self.private[pool_id].use_count -= 1

    # --- results to compare ------------------------------------------------------------------------------------------

    def snapshot(self) -> list[dict[str, object]]:
        """Like torch.bp.memory_snapshot, without the fields that depend on history."""
        result: list[dict[str, object]] = []
        for segment in self.segments:
            run: list[Block] = []
            for block in [*segment.blocks, None]:
                if block and block.mapped:
                    run.append(block)
                elif run:
                    result.append(
                        {
                            "address": run[0].address,
                            "total_size": sum(one.size for one in run),
                            "stream": segment.stream,
                            "segment_type": "small" if segment.pool.small else "large",
                            "segment_pool_id": segment.pool.id,
                            "is_expandable": bool(segment.page),
                            "blocks": [
                                (
                                    one.address,
                                    one.size,
                                    one.requested,
                                    "active_allocated"
                                    if one.allocated
                                    else "inactive"
                                    if one.is_free
                                    else "active_awaiting_free",
                                )
                                for one in run
                            ],
                        }
                    )
                    run = []
        return sorted(result, key=lambda segment: segment["address"])

    def statistics(self) -> dict[str, int]:
        """The current values that torch.bp.memory_stats must report."""
        blocks = [block for block in self.blocks() if block.mapped]
        active = [block for block in blocks if not block.is_free]
        allocated = [block for block in blocks if block.allocated]
        stuck = [block for block in blocks if block.is_free and block.is_split and not block.segment.page]
        limit = self.settings.max_split_size
        plain = [segment for segment in self.segments if not segment.page]
        return {
            "allocation.all.current": len(allocated),
            "allocated_bytes.all.current": sum(block.size for block in allocated),
            "allocated_bytes.small_pool.current": sum(b.size for b in allocated if b.segment.pool.small),
            "active.all.current": len(active),
            "active_bytes.all.current": sum(block.size for block in active),
            "requested_bytes.all.current": sum(block.requested for block in active),
            "inactive_split.all.current": len(stuck),
            "inactive_split_bytes.all.current": sum(block.size for block in stuck),
            "inactive_split_bytes.large_pool.current": sum(b.size for b in stuck if not b.segment.pool.small),
            "reserved_bytes.all.current": self.reserved,
            "segment.all.current": len(plain),
            "oversize_allocations.current": sum(block.size >= limit for block in allocated),
            "oversize_segments.current": sum(segment.size >= limit for segment in plain),
            "num_ooms": self.ooms,
            "num_alloc_retries": self.retries,
        }


def round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
