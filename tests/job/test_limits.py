"""What a machine gives, read from files as kernels write them."""

from __future__ import annotations

import mmap
from pathlib import Path

from hpczero.job.limits import Room, rooms, usage

GIB = 2**30


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def machine(root: Path, group: str) -> None:
    memory = f"MemTotal: {64 * 2**20} kB\nMemAvailable: {60 * 2**20} kB\nSwapTotal: 0 kB\n"
    write(root, {"proc/meminfo": memory, "proc/self/cgroup": group})


def limited(root: Path) -> list[Room]:
    return [room for room in rooms(root) if "control group" in room.name]


def test_limits_of_version_2_are_read_from_the_own_group_and_all_above_it(tmp_path: Path) -> None:
    machine(tmp_path, "0::/job/step/task\n")
    base = "sys/fs/cgroup"
    write(
        tmp_path,
        {
            f"{base}/memory.stat": "anon 1\n",  # the root has no limit
            f"{base}/job/memory.max": f"{8 * GIB}\n",
            f"{base}/job/memory.stat": f"anon {GIB}\nfile {5 * GIB}\nshmem {GIB}\n",
            f"{base}/job/step/memory.max": "max\n",
            f"{base}/job/step/task/memory.max": f"{2 * GIB}\n",
            f"{base}/job/step/task/memory.stat": "anon 7\nshmem 0\n",
        },
    )
    found = limited(tmp_path)
    # page cache goes when memory is asked for: it is not used up
    assert [(r.scope, r.nbytes, r.used) for r in found] == [
        ("v2/job/step/task", 2 * GIB, 7),
        ("v2/job", 8 * GIB, 2 * GIB),
    ]


def test_limits_of_version_1_are_read_beside_those_of_version_2(tmp_path: Path) -> None:
    machine(tmp_path, "4:cpu,memory:/batch/7\n0::/\n")
    base = "sys/fs/cgroup/memory"
    write(
        tmp_path,
        {
            f"{base}/memory.limit_in_bytes": "9223372036854771712\n",
            f"{base}/batch/memory.limit_in_bytes": "9223372036854771712\n",
            f"{base}/batch/7/memory.limit_in_bytes": f"{GIB}\n",
            f"{base}/batch/7/memory.stat": "rss 1\ntotal_rss 5\ntotal_shmem 6\n",
        },
    )
    assert [(r.scope, r.nbytes, r.used) for r in limited(tmp_path)] == [("v1/batch/7", GIB, 11)]


def test_a_container_that_sees_its_own_group_as_the_root_has_its_limit(tmp_path: Path) -> None:
    for group in ("0::/docker/abc\n", "0::/docker/other\n", "0::/\n"):
        machine(tmp_path, group)
        write(tmp_path, {"sys/fs/cgroup/memory.max": f"{3 * GIB}\n"})
        assert [r.nbytes for r in limited(tmp_path)] == [3 * GIB]


def test_swap_that_a_group_may_use_is_room_too(tmp_path: Path) -> None:
    machine(tmp_path, "0::/job\n")
    write(
        tmp_path,
        {
            "proc/meminfo": f"MemTotal: {4 * 2**20} kB\nSwapTotal: {2 * 2**20} kB\n",
            "sys/fs/cgroup/job/memory.max": f"{GIB}\n",
            "sys/fs/cgroup/job/memory.swap.max": f"{GIB // 2}\n",
        },
    )
    assert [r.nbytes for r in limited(tmp_path)] == [GIB + GIB // 2]
    assert [r.nbytes for r in rooms(tmp_path) if r.scope == "host"] == [6 * GIB]


def test_a_machine_without_these_files_has_no_bounds_from_them(tmp_path: Path) -> None:
    assert limited(tmp_path) == []


def test_usage_of_this_process_is_what_the_kernel_says() -> None:
    before = usage()
    held = mmap.mmap(-1, 64 * 2**20, flags=mmap.MAP_PRIVATE)  # the heap may have as much free
    held.write(bytes([1]) * len(held))
    after = usage()
    assert len(held) <= after.resident - before.resident + 2**22
    assert len(held) <= after.mapped - before.mapped + 2**22
    assert len(held) <= after.private - before.private + 2**22


def test_a_parent_of_version_1_that_does_not_sum_its_children_is_no_limit(tmp_path: Path) -> None:
    machine(tmp_path, "4:memory:/a/b\n")
    base = "sys/fs/cgroup/memory/a"
    limits = {f"{base}/memory.limit_in_bytes": "700\n", f"{base}/b/memory.limit_in_bytes": "9000\n"}
    write(tmp_path, {**limits, f"{base}/memory.use_hierarchy": "0\n"})
    assert [room.nbytes for room in limited(tmp_path)] == [9000]
    write(tmp_path, {f"{base}/memory.use_hierarchy": "1\n"})
    assert [room.nbytes for room in limited(tmp_path)] == [9000, 700]


def test_numbers_that_are_none_are_passed_over(tmp_path: Path) -> None:
    machine(tmp_path, "0::/../../a\n")
    write(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: \u00b2 kB\n",
            "proc/self/statm": "\u00b2 " * 7,
            "sys/fs/cgroup/memory.max": "900",
            "sys/fs/cgroup/memory.stat": f"anon \u00b2\nshmem {'9' * 5000}\n",
        },
    )
    assert [(room.nbytes, room.used) for room in rooms(tmp_path) if room.kind != "shared"] == [
        (900, 0)
    ]
    assert usage(tmp_path).mapped == 0
    write(tmp_path, {"sys/fs/cgroup/memory.max": "9" * 5000})
    assert limited(tmp_path) == []
