"""Storage of the key-value cache: pages of tokens with reference counts, and the table of the pages of one cache.

Page c of a batch item holds its tokens page_keys * c ... page_keys * (c + 1) - 1, counted from the first token ever
appended, for all key heads. One page is one run of memory that starts on a cache line:

    keys    (kv_heads, page_keys // 16, head_dim, 16)    panels of 16 keys, transposed: a decode step reads 16 keys of
                                                         one dimension as one vector and needs no shuffle
    values  (kv_heads, page_keys, value_dim)             row after row

    table   (batch, n_pages)      item 0   [ A  B  C  . ]      a number is the address of a page, 0 means no page:
                                  item 1   [ A  B  D  . ]      not there yet, or all its tokens were evicted

Growing means one more page and never a copy of tokens. Forks and beams share pages (A and B above); a cache that writes
into a shared page copies that page first. Pages are cut from slabs of uninitialised memory and go back to a free list,
never to the operating system before the last cache that uses them is gone.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.constants import ALIGN, PANEL
from ..storage import bfloat16_numbers

Array = NDArray[Any]
Index = NDArray[np.intp]

# One lock for all pools, because a process that forks must hold it: else a child could inherit a pool in the middle of
# a change by a thread that the child does not have, locked for ever. Reentrant, because a signal handler may fork.
_lock = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def signed(addresses: list[int]) -> list[int]:
    """Addresses as tables hold them: those of the upper half of the memory are negative."""
    numbers: list[int] = np.array(addresses, np.uintp).view(np.intp).tolist()
    return numbers


class PagePool:
    """The pages of a cache and of all its forks.

    The lock makes forks in different threads independent of each other: only references are shared, and a page with
    more than one of them is never written to. A table may die in the middle of anything (the garbage collector runs
    where it likes), so it takes no lock: it leaves its pages in `returned`, and they are counted off before the next
    decision.
    """

    def __init__(self, kv_heads: int, head_dim: int, value_dim: int, page_keys: int, dtype: np.dtype[Any]) -> None:
        self.page_keys, self.dtype = page_keys, dtype
        self._key_shape = (kv_heads, page_keys // PANEL, head_dim, PANEL)
        self._value_shape = (kv_heads, page_keys, value_dim)
        self._key_items = kv_heads * page_keys * head_dim
        self._items = self._key_items + kv_heads * page_keys * value_dim
        self.page_bytes = -(-self._items * dtype.itemsize // ALIGN) * ALIGN
        self.returned: deque[Index] = deque()
        self._pages: dict[int, Array] = {}  # address: the elements of the page; the views keep the slabs alive
        self._references: dict[int, int] = {}  # address: number of places in tables, for pages in use
        self._free: list[int] = []

    # ---- memory ----

    def grow(self, pages: int) -> None:
        """One more slab. MemoryError leaves everything as it was."""
        if pages <= 0:
            return
        slab = np.empty(pages * self.page_bytes + ALIGN, np.uint8)
        skip = -slab.ctypes.data % ALIGN
        lines = slab[skip : skip + pages * self.page_bytes].reshape(pages, self.page_bytes)
        cut = list(lines[:, : self._items * self.dtype.itemsize].view(self.dtype))
        addresses = signed([page.ctypes.data for page in cut])
        with _lock:
            self._pages.update(zip(addresses, cut, strict=True))
            self._free += reversed(addresses)

    def page(self, address: int) -> Array:
        """The elements of a page on one axis."""
        return self._pages[address]

    def keys(self, address: int) -> Array:
        """The keys of a page: a view (kv_heads, page_keys // 16, head_dim, 16)."""
        return self._pages[address][: self._key_items].reshape(self._key_shape)

    def values(self, address: int) -> Array:
        """The values of a page: a view (kv_heads, page_keys, value_dim)."""
        return self._pages[address][self._key_items :].reshape(self._value_shape)

    # ---- references ----

    def take(self, wanted: int) -> list[int]:
        """That many pages, each with one reference. MemoryError leaves everything as it was."""
        with _lock:
            self._settle()
            self.grow(wanted - len(self._free))
            taken = [self._free.pop() for _ in range(wanted)]
            self._references.update(dict.fromkeys(taken, 1))
            return taken

    def share(self, addresses: Iterable[int]) -> None:
        with _lock:
            for address in addresses:
                self._references[address] += 1

    def release(self, addresses: Iterable[int]) -> None:
        with _lock:
            for address in addresses:
                if self._references[address] == 1:
                    del self._references[address]
                    self._free.append(address)
                else:
                    self._references[address] -= 1

    def unshared(self, addresses: list[int]) -> list[int]:
        """Those of the pages that have no other reference."""
        with _lock:
            self._settle()
            return [address for address in addresses if self._references[address] == 1]

    def shared(self, addresses: list[int]) -> list[int]:
        """Indices of the pages that must be copied before all of `addresses` are written to.

        Of a page that has all its references among them one need not be copied: the last one keeps the page.
        """
        with _lock:
            self._settle()
            left, copied = {address: self._references[address] for address in addresses}, []
            for i, address in enumerate(addresses):
                if left[address] > 1:
                    left[address] -= 1
                    copied.append(i)
            return copied

    def _settle(self) -> None:
        while self.returned:
            self.release(addresses_in(self.returned.popleft()))


def addresses_in(table: Index) -> list[int]:
    """The pages of a table, once for each place they stand in."""
    found: list[int] = table[table != 0].tolist()
    return found


class PageTable:
    """The pages of one cache. `table` is replaced, never written in place, so a reader always has a whole one."""

    def __init__(self, pool: PagePool, table: Index) -> None:
        self.pool, self.table = pool, table

    def __del__(self) -> None:
        if hasattr(self, "table"):  # else a signal came before __init__ had begun
            self.pool.returned.append(self.table)

    def fork(self) -> PageTable:
        self.pool.share(addresses_in(self.table))
        return PageTable(self.pool, self.table.copy())

    def reorder(self, items: Index) -> None:
        before, after = self.table, self.table[items]
        self.pool.share(addresses_in(after))
        self.table = after
        self.pool.release(addresses_in(before))

    def open(self, starts: Index, counts: Index, held_from: Index, kept_first: int) -> None:
        """Makes the tokens starts ... starts + counts - 1 of each item writable.

        Missing pages are taken, shared ones copied, and the pages that hold only tokens that are neither below
        kept_first nor at or after held_from are given up. All or nothing: no page of the table loses a reference or a
        token before the new table stands, so what breaks in before (an exception, a signal) costs at most unused pages.
        """
        pool = self.pool
        size, columns = pool.page_keys, self.table.shape[1]
        ends = np.where(counts > 0, starts + counts, 0)
        needed = -(-int(ends.max(initial=0)) // size)
        if needed > columns:  # doubled, so that a long life costs few copies of the table
            columns = max(needed, 2 * columns)
        table = np.zeros((len(self.table), columns), np.intp)
        table[:, : self.table.shape[1]] = self.table
        first = size * np.arange(columns)  # tokens
        there = table != 0
        wanted = (first < ends[:, None]) & (first + size > starts[:, None])
        present = wanted & there
        missing = wanted ^ present
        evicted = there & (first >= kept_first) & (first + size <= held_from[:, None])
        old, given_up = table[present].tolist(), table[evicted].tolist()
        copied, new = pool.shared(old), int(missing.sum())
        if not (new or copied or given_up):
            return
        spare = pool.unshared(given_up)[:new]  # becomes a missing page in the moment when the table changes
        taken = spare + pool.take(new + len(copied) - len(spare))
        own = list(old)
        for i in copied:
            own[i] = taken.pop()
            pool.page(own[i])[:] = pool.page(old[i])
        table[present] = own
        table[missing] = taken
        table[evicted] = 0
        self.table = table
        pool.release([old[i] for i in copied] + [address for address in given_up if address not in spare])

    def cut(self, ends: Index) -> None:
        """Gives up the pages that start at or after the end of their item."""
        table = self.table.copy()
        beyond = (self.pool.page_keys * np.arange(table.shape[1]) >= ends[:, None]) & (table != 0)
        given_up = table[beyond].tolist()
        if given_up:
            table[beyond] = 0
            self.table = table
            self.pool.release(given_up)

    def parts(self, item: int, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """(page, first slot, end slot, offset from start) of the pages that hold the tokens start ... end - 1."""
        size = self.pool.page_keys
        for column in range(start // size, -(-end // size) if start < end else 0):  # no token needs no page
            first, last = max(start, column * size), min(end, (column + 1) * size)
            yield int(self.table[item, column]), first - column * size, last - column * size, first - start

    def read(self, item: int, start: int, end: int, keys: Array, values: Array) -> None:
        """Copies the tokens start ... end - 1 of an item to keys (kv_heads, n, head_dim) and values.

        Of 16 bits to arrays in their own dtype, or as numbers to wider ones.
        """
        for address, first, last, offset in self.parts(item, start, end):
            target = slice(offset, offset + last - first)
            panels = self.pool.keys(address)[:, first // PANEL : -(-last // PANEL)].swapaxes(2, 3)
            rows = panels.reshape(len(panels), -1, panels.shape[-1])
            found = rows[:, first % PANEL : first % PANEL + last - first], self.pool.values(address)[:, first:last]
            for to, part in zip((keys, values), found, strict=True):
                bits = self.pool.dtype == np.uint16 and to.dtype != np.uint16
                to[:, target] = bfloat16_numbers(part) if bits else part

    def write(self, item: int, start: int, keys: Array, values: Array) -> None:
        """Copies keys (kv_heads, n, head_dim) and values, both in the pool's dtype, to the tokens start ...
        start + n - 1 of an opened item."""
        for address, first, last, offset in self.parts(item, start, start + keys.shape[1]):
            source = slice(offset, offset + last - first)
            slots = np.arange(first, last)
            target = self.pool.keys(address)
            target[:, slots // PANEL, :, slots % PANEL] = keys[:, source].swapaxes(0, 1)
            self.pool.values(address)[:, first:last] = values[:, source]
