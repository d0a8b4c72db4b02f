"""Seeded faults in layer-wise loads from host memory. The tests of a fault's area (areas.py) must detect the fault."""

from __future__ import annotations

from tests.mutants.fault import of

POOLS = "services/worker/exec/pools"
LOADS = (
    *of(
        "loads",
        f"{POOLS}/kv_pool.py",
        ("if each.next < each.count and each not in self._awaited", "if False"),
        ("if np.isin(pages, each.pages).any()", "if True"),
        ("each.wait(each.groups.of[layer])", "pass"),
        ("each.wait(each.groups.of[layer])", "each.wait(each.count - 1)"),
        ("self._awaited[-1].wait(self._awaited[-1].count - 1)", "pass"),
        ("if group >= self.next:", "if group > self.next:"),
        ("(*range(first, total), *range(first))", "range(total)"),
        ("each.arrival.settle(each.count - 1)", "pass"),
    ),
    *of(
        "loads",
        f"{POOLS}/kv_pool.py",
        ("                    self._arrivals.add(pages, groups, arrival)\n", ""),
        ("num_bytes * (count - group) <= self._bytes_s * EARLY_S * count", "self._bytes_s > 0"),
        ("if num_bytes >= MIN_RATED_BYTES:", "if True:"),
        ("            arrival.failed(error)\n", ""),
        ("            if not reported:\n                raise\n", ""),
    ),
    *of("loads", f"{POOLS}/kv_pool.py", ("self.arrivals.wait(self.first + index)", "pass")),
    *of(
        "loads",
        "services/worker/exec/tiers/page_mover.py",
        ("self._arrivals.settle()  # a load may", "pass  # a load may"),
        ("        self._arrivals.settle()\n        if operation.group:\n", "        if operation.group:\n"),
        ("self.on_lost(str(error))", "pass"),
        ("Fact(operation.op_id, count, early=True)", "Fact(operation.op_id, count)"),
    ),
    *of(
        "loads",
        "services/worker/exec/executor.py",
        ("                self._mover.settle()  # ends copies into pages that may be released\n", "                pass\n"),
        ("            mover.on_lost = self._lose", "            pass"),
        ("        if not was_lost:", "        if True:"),
    ),
    *of("loads", "services/worker/exec/tiers/page_copier.py", ("            self._arrivals.settle()\n", "")),
    *of(
        "loads",
        "services/worker/exec/tiers/page_copier.py",
        ("np.stack((parts, parts + 1), axis=1).ravel()", "parts"),
        ("memory.data_ptr() + rows.astype(np.int64) * memory.stride(0)", "memory.data_ptr() + rows.astype(np.int64)"),
    ),
    *of(
        "loads",
        "services/worker/exec/tiers/make_tiers.py",
        ("is_equal = found.equal(row)", "is_equal = True"),
        ("        row.copy_(before)\n", ""),
    ),
    *of(
        "loads",
        "services/worker/exec/step/model_runner.py",
        ("                self._arrivals.wait_all()  # the layers of a graph cannot wait for single arrivals\n", ""),
    ),
    *of(
        "loads",
        "services/worker/core/tiers/lanes.py",
        ("can_be_late = lane != HOST.lane or not self.num_landing", "can_be_late = True"),
        ("        self._rates.moved(Tier.HOST, pages, seconds)\n", ""),
        ("        if any(running.place is HOST for running in self):", "        if HOST.lane in self._free_at:"),
    ),
    *of(
        "loads",
        "services/worker/core/tiers/imports.py",
        ("self._load_at_once if place is HOST else self._at_once", "self._at_once"),
    ),
    *of(
        "loads",
        "services/worker/core/tiers/tiers.py",
        ("return self._lanes.num_landing > 0 or self._landed_at >= then", "return self._lanes.num_landing > 0"),
        ("return self._lanes.num_landing > 0 or self._landed_at >= then", "return self._landed_at >= then"),
        ("return self._lanes.num_landing > 0 or self._landed_at >= then", "return True"),
    ),
    *of(
        "loads",
        "kernels/triton/page_pieces.py",
        ("steps = begin + tl.arange(0, BLOCK)", "steps = tl.arange(0, BLOCK)"),
        ("part, at = piece // num_rows, piece % num_rows", "part, at = piece // num_rows, piece // num_rows"),
    ),
)
