"""Memory of a machine, and of a container on it."""

from pathlib import Path

from cluster.machine_memory import MachineMemory, machine_memory

GIB = 2**30
MEMINFO = "".join(
    f"{key}:   {gib * 2**20} kB\n" for key, gib in (("MemTotal", 64), ("MemAvailable", 48), ("SwapTotal", 8))
)
GROUP = {
    "memory.max": f"{16 * GIB}\n",
    "memory.current": f"{12 * GIB}\n",
    "memory.stat": f"anon {9 * GIB}\ninactive_file {3 * GIB}\nactive_file 0\n",
    "memory.swap.max": "0\n",
}


def test_a_machine_has_what_the_kernel_says() -> None:
    memory = MachineMemory.of(MEMINFO, {})
    assert (memory.total, memory.available, memory.owner) == (72 * GIB, 48 * GIB, "this machine")
    assert MachineMemory.of(MEMINFO, GROUP | {"memory.max": "max\n"}) == memory
    assert MachineMemory.of("", {}) == MachineMemory(total=0, available=0)


def test_a_container_has_no_more_than_its_control_group_leaves() -> None:
    memory = MachineMemory.of(MEMINFO, GROUP)
    assert (memory.total, memory.available, memory.owner) == (16 * GIB, 7 * GIB, "this container")
    assert MachineMemory.of(MEMINFO, GROUP | {"memory.swap.max": "max\n"}).total == 24 * GIB
    assert MachineMemory.of(MEMINFO, GROUP | {"memory.max": f"{8 * GIB}"}).available == 0


def test_a_limit_above_the_machine_is_none() -> None:
    memory = MachineMemory.of(MEMINFO, GROUP | {"memory.max": f"{1024 * GIB}", "memory.swap.max": "max"})
    assert memory == MachineMemory.of(MEMINFO, {})


def test_files_are_read_where_they_are(tmp_path: Path) -> None:
    for name, text in (GROUP | {"meminfo": MEMINFO}).items():
        (tmp_path / name).write_text(text)
    assert machine_memory(tmp_path / "meminfo", tmp_path) == MachineMemory.of(MEMINFO, GROUP)
    assert machine_memory(tmp_path / "none", tmp_path / "none") == MachineMemory(total=0, available=0)
    assert machine_memory().available > 0
