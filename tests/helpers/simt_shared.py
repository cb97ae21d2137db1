"""Shared memory for `simt.py`: rings that `cp.async` fills, and lanes that exchange numbers.

A copy comes when it is asked for, or only when somebody waits for it (`machine.late`): a kernel
must be right with both. Until then its place holds NaN. What would read outside, copy
unaligned or leave copies behind is an error.
"""

from __future__ import annotations

import re

import simt
import torch
from simt import plain

UNREAD = 0x7F  # bytes of no number


class Machine(simt.Machine):
    """Programs with shared memory."""

    late = False
    worst_banks = 1

    def SwizzledSharedLayout(self, *parts):
        return None

    def allocate_shared_memory(self, dtype, shape, layout):
        size = shape[0] * 1024
        self.shared = torch.full((size,), UNREAD, dtype=torch.uint8)
        self.open, self.groups = [], []
        return self

    def index(self, at):
        self.used = at * 1024  # what follows is there only so that the tensor exists
        return self

    def store(self, *args, **options):
        if not isinstance(args[0], torch.Tensor):
            super().store(*args, **options)

    def finish(self):
        """Nothing may be under way when a program ends."""
        assert not self.open + [c for g in self.groups for c in g], "copies are left over"

    def land(self, copies):
        for to, source, size in copies:
            self.shared[to : to + size] = self.memory[source : source + size]

    def ask(self, to, source, size):
        assert to % 16 == source % 16 == size % 16 == 0 < size, "a copy is not aligned"
        assert 0 <= to <= to + size <= self.used, "a copy outside shared memory"
        self.shared[to : to + size] = UNREAD
        if not self.late:
            self.land([(to, source, size)])
        return (to, source, size)

    def read(self, at, size):
        assert bool((at % size == 0).all()), "an address is not aligned"
        assert bool((at >= 0).all() and (at + size <= self.used).all()), "outside shared memory"
        if size == 16:
            for phase in (at // 16).reshape(-1, 8).tolist():
                banks = [line % 8 for line in set(phase)]
                self.worst_banks = max(self.worst_banks, *(banks.count(bank) for bank in banks))
        return self.shared[at.long()[:, None] + torch.arange(size)].contiguous()


class Assembly(simt.Assembly):
    """The instructions that shared memory has."""

    def _do(self, statement):
        condition = torch.ones(self.threads, dtype=torch.bool)
        text = statement
        if found := re.match(r"@(\w+) (.*)", statement):
            condition, text = self.registers[found[1]], found[2]
        for known, do in self._SHARED.items():
            if known in text:
                addresses = re.findall(r"\[([^\]]*)\]", text)
                do(self, text, [self._address(part) for part in addresses], condition)
                return
        super()._do(statement)

    def _address(self, text):
        name, _, offset = text.partition(" + ")
        return plain(self.registers[name]).expand(self.threads) + int(offset or 0)

    def _start(self, text, addresses, condition):
        self._put("$0", torch.zeros(self.threads, dtype=torch.int32))

    def _nothing(self, text, addresses, condition):
        """All threads run at once."""

    def _read(self, text, addresses, condition):
        names = text.split(", [")[0].split(" ", 1)[1].strip("{}").split(", ")
        found = self.machine.read(addresses[0], 4 * len(names)).view(torch.int32)
        for i, name in enumerate(names):
            self._put(name, found[:, i])

    def _write(self, text, addresses, condition):
        names = text.split("], ")[1].strip("{}").split(", ")
        for i, name in enumerate(names):
            at = (addresses[0] + 4 * i)[condition].long()
            assert bool((at >= 0).all() and (at + 4 <= self.machine.used).all()), "outside"
            value = self._bits(name).expand(self.threads)[condition].contiguous()
            self.machine.shared[at[:, None] + torch.arange(4)] = value[:, None].view(torch.uint8)

    def _other_lane(self, text, addresses, condition):
        to, source, offset, *_ = text.split(" ", 1)[1].split(", ")
        value = plain(self._value(source)).expand(self.threads).reshape(-1, 32)
        self._put(to, value[:, torch.arange(32) ^ int(offset)].flatten())

    def _rows(self, text, addresses, condition):
        size = int(text.split(", ")[-1])
        pairs = zip(addresses[0][condition].tolist(), addresses[1][condition].tolist(), strict=True)
        self.machine.open += [self.machine.ask(to, source, size) for to, source in pairs]

    def _commit(self, text, addresses, condition):
        self.machine.groups.append(self.machine.open)
        self.machine.open = []

    def _wait_group(self, text, addresses, condition):
        done = max(0, len(self.machine.groups) - int(text.split()[-1]))
        for group in self.machine.groups[:done]:
            self.machine.land(group)
        self.machine.groups = self.machine.groups[done:]

    _SHARED = {  # noqa: RUF012 - a table
        "global_smem": _start,
        "bar.warp.sync": _nothing,
        "ld.shared": _read,
        "st.shared": _write,
        "shfl.sync": _other_lane,
        "cp.async.cg": _rows,
        "cp.async.commit_group": _commit,
        "cp.async.wait_group": _wait_group,
    }


Machine.assembly = Assembly


def load(module, kernel, *more, late=False):
    """Return a kernel and its machine, as `simt.load` does."""
    function, machine = simt.load(module, kernel, *more, machine=Machine())
    machine.late = late
    return function, machine
