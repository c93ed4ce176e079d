"""The doctor's findings, from made-up facts: no MPI, no launcher."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpczero.doctor import environment, examination, launch, probes
from hpczero.doctor import probes as storage
from hpczero.doctor.environment import TRAPS, check_environment
from hpczero.doctor.finding import Finding, Status, exit_code, summary
from hpczero.probe.tiers import Speed
from tests.helpers.mpirun import ROOT

GIB = 2**30


def rank_facts(rank: int, **changes: object) -> launch.RankFacts:
    """A good rank: node of two, four cores of its own, four threads."""
    local_rank = rank % 2
    good = launch.RankFacts(
        rank=rank,
        host=f"node{rank // 2}",
        node_index=rank // 2,
        local_rank=local_rank,
        cores=frozenset(range(4 * local_rank, 4 * local_rank + 4)),
        omp_threads=4,
        shm_nbytes=(64 * GIB, 63 * GIB),
        versions=dict.fromkeys(environment.REQUIRED, "9.9"),
    )
    return dataclasses.replace(good, **changes)  # type: ignore[arg-type]


def four_ranks(**changes: object) -> list[launch.RankFacts]:
    return [rank_facts(rank, **changes) for rank in range(4)]


def statuses(findings: Sequence[Finding]) -> list[Status]:
    return [finding.status for finding in findings]


def assert_problem(finding: Finding, status: Status, value: str, remedy: str) -> None:
    assert finding.status is status, finding
    assert value in finding.value
    assert remedy in finding.remedy


# --- launch --------------------------------------------------------------------------------------


IN_PART = {"OMPI_COMM_WORLD_SIZE": "2", "SLURM_NTASKS": "4"}  # mpirun in a larger allocation


@pytest.mark.parametrize(
    ("size", "variables", "status", "value", "remedy"),
    [
        (1, {"SLURM_NTASKS": "4"}, Status.FAIL, "SLURM_NTASKS=4", "--mpi=pmix"),
        (1, {"WORLD_SIZE": "4", "RANK": "2"}, Status.FAIL, "WORLD_SIZE=4", "mpirun -n 4"),
        (2, {"OMPI_COMM_WORLD_SIZE": "4"}, Status.FAIL, "OMPI_COMM_WORLD_SIZE=4", "launcher"),
        (2, {"PMI_SIZE": "4"}, Status.FAIL, "PMI_SIZE=4", "launcher"),
        (2, {"SLURM_NTASKS": "4"}, Status.FAIL, "SLURM_NTASKS=4", "launcher"),
        (2, IN_PART, Status.WARN, "SLURM_NTASKS=4", "start 4 ranks"),
        (1, IN_PART, Status.FAIL, "", ""),
        (3, {}, Status.OK, "", ""),
        (3, {"PMI_SIZE": "3"}, Status.OK, "", ""),
        (3, {"SLURM_NTASKS": "3"}, Status.OK, "", ""),
    ],
)
def test_size_of_the_world_is_that_of_the_launcher_or_a_problem(
    size: int, variables: dict[str, str], status: Status, value: str, remedy: str
) -> None:
    assert_problem(launch.check_world_size(size, variables), status, value, remedy)


def test_good_ranks_have_no_launch_problem() -> None:
    ranks = four_ranks()
    assert launch.check_nodes(ranks).value.startswith("2: node 0 (node0): local ranks 0-1")
    checks = (launch.check_nodes, launch.check_binding, launch.check_threads)
    findings = [launch.check_cores(ranks, {}), *(check(ranks) for check in checks)]
    assert statuses(findings) == [Status.OK] * 4


def test_uneven_nodes_warn() -> None:
    finding = launch.check_nodes(four_ranks()[:3])
    assert_problem(finding, Status.WARN, "1 to 2", "--ntasks-per-node")


def test_more_ranks_than_cores_warn_and_name_the_yield_variable_until_it_is_set() -> None:
    ranks = four_ranks(cores=frozenset([3]), omp_threads=1)
    loud = launch.check_cores(ranks, {})
    assert_problem(loud, Status.WARN, "2 ranks on 1 core", "mpi_yield_when_idle=1")
    quiet = launch.check_cores(ranks, {"OMPI_MCA_mpi_yield_when_idle": "1"})
    assert "yield" not in quiet.remedy


def test_ranks_that_share_cores_warn_where_there_are_enough_for_all() -> None:
    shared = launch.check_binding(four_ranks(cores=frozenset(range(8))))
    assert_problem(shared, Status.WARN, "cores 0-7", "--cpu-bind=cores")
    crowded = launch.check_binding(four_ranks(cores=frozenset([3])))
    assert crowded.status is Status.OK  # check_cores says it


def test_core_sets_are_printed_as_ranges() -> None:
    finding = launch.check_binding([rank_facts(0, cores=frozenset([0, 1, 2, 5, 7, 8]))])
    assert finding.value == "rank 0: cores 0-2,5,7-8"


@pytest.mark.parametrize(
    ("threads", "value"), [(8, "16 OpenMP threads on 8 cores"), (None, "is not set")]
)
def test_too_many_threads_warn_with_the_number_to_set(threads: int | None, value: str) -> None:
    finding = launch.check_threads(four_ranks(omp_threads=threads))
    assert_problem(finding, Status.WARN, value, "OMP_NUM_THREADS=4")


def test_more_threads_than_cores_of_one_bound_rank_warn() -> None:
    bound = [rank_facts(0, cores=frozenset([0])), rank_facts(1, cores=frozenset(range(1, 8)))]
    assert_problem(launch.check_threads(bound), Status.WARN, "rank 0 runs 4", "OMP_NUM_THREADS")


@pytest.mark.parametrize(
    ("value", "threads"), [("4", 4), ("2,1", 2), (" 3 ", 3), ("", None), ("many", None)]
)
def test_omp_threads_are_read_as_openmp_reads_them(value: str, threads: int | None) -> None:
    assert launch.omp_threads({"OMP_NUM_THREADS": value}) == threads


# --- environment ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OMPI_MCA_btl", "tcp,self"),
        ("OMPI_MCA_btl", "^vader"),
        ("OMPI_MCA_btl_vader_single_copy_mechanism", "none"),
        ("UCX_TLS", "tcp,self"),
        ("FI_PROVIDER", "TCP"),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True"),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True"),
        ("KMP_AFFINITY", "granularity=fine,proclist=[0-3],explicit"),
        ("HPCZERO_STRICT", "1"),
    ],
)
def test_harmful_variable_is_found_and_named(name: str, value: str) -> None:
    (finding,) = check_environment({name: value, "HOME": "/"})
    assert_problem(finding, Status.WARN, f"{name}={value}", "")


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"OMPI_MCA_btl": "self,vader,tcp"},
        {"OMPI_MCA_btl": "self,sm,tcp"},
        {"OMPI_MCA_btl": "^openib"},
        {"UCX_TLS": "rc,sm,self"},
        {"UCX_TLS": "tcp,sm,self"},
        {"KMP_AFFINITY": "compact"},
        {"HPCZERO_STRICT": "0"},
    ],
)
def test_harmless_variables_are_not_complained_about(variables: dict[str, str]) -> None:
    assert [finding.status for finding in check_environment(variables)] == [Status.OK]


def test_every_harmful_variable_is_reported_not_only_the_first() -> None:
    found = check_environment({"UCX_TLS": "tcp", "CUDA_LAUNCH_BLOCKING": "1"})
    assert len(found) == 2
    assert len({(trap.name, trap.pattern) for trap in TRAPS}) == len(TRAPS)


def test_unusable_value_of_our_own_variable_blocks() -> None:
    (finding,) = check_environment({"HPCZERO_TIMEOUT": "soon"})
    assert_problem(finding, Status.FAIL, "HPCZERO_TIMEOUT", "unset")


# --- MPI, storage, software ------------------------------------------------------------------------


def test_wrong_sum_is_a_blocking_problem_that_names_the_dtype() -> None:
    finding = probes.check_trials("sum", {"float64": "", "float32": "wrong values on rank 3"})
    assert_problem(finding, Status.FAIL, "float32: wrong values on rank 3", "mpi4py")
    assert "float64" not in finding.value


def test_low_thread_level_warns() -> None:
    assert probes.check_thread_level("multiple").status is Status.OK
    assert_problem(probes.check_thread_level("funneled"), Status.WARN, "funneled", "thread")


@pytest.mark.parametrize(("same_node", "remedy"), [(True, "shared memory"), (False, "fabric")])
def test_slow_pair_warns_by_where_the_ranks_are(same_node: bool, remedy: str) -> None:
    slow = probes.PairSpeed(peer=3, nbytes=16 * 2**20, latency_s=2e-6, bytes_per_s=1.1e8)
    assert_problem(probes.check_pair(slow, same_node), Status.WARN, "0.11 GB/s at 16 MiB", remedy)
    fast = dataclasses.replace(slow, bytes_per_s=12e9)
    assert probes.check_pair(fast, same_node).status is Status.OK


@pytest.mark.parametrize(
    ("version", "io", "status"),
    [
        ((4, 1, 4), "", Status.WARN),
        ((4, 1, 4), "^ompio", Status.OK),
        ((4, 1, 4), "romio321", Status.OK),
        ((4, 1, 7), "", Status.OK),
        ((5, 0, 5), "", Status.WARN),
        ((5, 0, 6), "", Status.OK),
    ],
)
def test_mpi_io_that_loses_data_warns(version: tuple[int, ...], io: str, status: Status) -> None:
    finding = storage.check_mpi_io("Open MPI", version, {"OMPI_MCA_io": io})
    assert finding.status is status
    assert storage.check_mpi_io("MPICH", version, {}).status is Status.OK


def test_two_mpi_libraries_in_one_process_block() -> None:
    maps = [
        "7f01-7f02 r-xp 00000000 08:01 123  /usr/lib/openmpi/lib/libmpi.so.40.30.4",
        "7f02-7f03 r--p 00000000 08:01 123  /usr/lib/openmpi/lib/libmpi.so.40.30.4",
        "7f03-7f04 r-xp 00000000 08:01 124  /site/mpich/libmpich.so.12",
        "7f04-7f05 r-xp 00000000 08:01 125  /usr/lib/libmpi_cxx.so.40",
        "7f05-7f06 r-xp 00000000 08:01 126  /cray/libmpi_gtl_cuda.so.0",
        "7f05-7f06 r-xp 00000000 08:01 127  /cray/libmpi_gnu_123.so.12",
        "7f06-7f07 rw-p 00000000 00:00 0",
        "",
    ]
    paths = storage.mpi_libraries(maps)
    assert paths == [
        "/cray/libmpi_gnu_123.so.12",
        "/site/mpich/libmpich.so.12",
        "/usr/lib/openmpi/lib/libmpi.so.40.30.4",
    ]
    assert_problem(storage.check_one_mpi(paths), Status.FAIL, "libmpich.so.12", "rebuild")
    assert storage.check_one_mpi(paths[:1]).status is Status.OK


@pytest.mark.parametrize(
    ("facts", "status", "remedy"),
    [
        (storage.Hdf5Facts("3.16", "1.10.8", parallel=True), Status.OK, ""),
        (storage.Hdf5Facts("3.16", "1.10.8", parallel=False), Status.WARN, "HDF5_MPI=ON"),
        (storage.Hdf5Facts("3.16", "1.10", True, "No space left"), Status.FAIL, "--directory"),
        (storage.Hdf5Facts("", trial_error="No module"), Status.FAIL, "pip install h5py"),
    ],
)
def test_hdf5_verdict(facts: storage.Hdf5Facts, status: Status, remedy: str) -> None:
    assert_problem(storage.check_hdf5(facts, Path("/data")), status, facts.trial_error, remedy)


def test_smallest_shared_memory_of_all_nodes_counts() -> None:
    ranks = four_ranks()
    assert storage.check_shared_memory(ranks).status is Status.OK
    ranks[2] = rank_facts(2, shm_nbytes=(GIB // 16, GIB // 16))
    assert_problem(storage.check_shared_memory(ranks), Status.WARN, "least: node1", "--shm-size")
    ranks[3] = rank_facts(3, shm_nbytes=None)
    assert_problem(storage.check_shared_memory(ranks), Status.WARN, "does not exist on node1", "")


def test_shared_memory_that_is_not_there_has_no_size(tmp_path: Path) -> None:
    assert storage.shared_memory_nbytes(str(tmp_path / "none")) is None


def test_packages_missing_or_different_on_one_rank_block() -> None:
    ranks = four_ranks()
    assert statuses(environment.check_versions(ranks)) == [Status.OK]
    without = {name: text for name, text in ranks[3].versions.items() if name != "torch"}
    (missing,) = environment.check_versions([*ranks[:3], rank_facts(3, versions=without)])
    assert_problem(missing, Status.FAIL, "torch not installed on rank 3", "pip install torch")
    other = rank_facts(3, versions={**ranks[3].versions, "numpy": "1.0"})
    found = environment.check_versions([*ranks[:3], other])
    assert_problem(found[-1], Status.FAIL, "numpy is 1.0 on rank 3 (node1), 9.9 on rank 0", "one")


@pytest.mark.parametrize(
    ("name", "version"),
    [("mpi4py", "4.0.2"), ("numpy", "1.26.4"), ("torch", "2.7.1+cu126"), ("h5py", "3.10.0")],
)
def test_a_package_that_is_too_old_warns(name: str, version: str) -> None:
    ranks = four_ranks(versions={**rank_facts(0).versions, name: version})
    found = environment.check_versions(ranks)[-1]
    assert_problem(found, Status.WARN, f"{name} {version} is older than", f"--upgrade {name}")


def test_the_oldest_packages_are_those_of_setup_cfg_and_of_the_readme() -> None:
    for name, oldest in environment.OLDEST.items():
        ranks = four_ranks(versions={**rank_facts(0).versions, name: oldest})
        assert statuses(environment.check_versions(ranks)) == [Status.OK]
        assert f"    {name} >= {oldest}\n" in (ROOT / "setup.cfg").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"{n} {environment.OLDEST[n]} or newer" in readme for n in ("torch", "mpi4py"))


def test_torch_that_does_not_load_blocks() -> None:
    assert environment.check_torch("2.13.0", 4, "").value == "2.13.0, 4 threads on rank 0"
    broken = environment.check_torch("", 0, "libc10.so: cannot open")
    assert_problem(broken, Status.FAIL, "libc10.so", "pip install torch")


def test_gpus_are_found_by_their_device_files(tmp_path: Path) -> None:
    assert environment.check_gpu(environment.gpu_devices(str(tmp_path)), {}).status is Status.OK
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    devices = environment.gpu_devices(str(tmp_path))
    assert_problem(environment.check_gpu(devices, {}), Status.WARN, "2 on this node", "cuda12")
    with_cupy = environment.check_gpu(devices, {"cupy-cuda12x": "13.6"})
    assert with_cupy == Finding("GPU", "2 on this node, cupy-cuda12x 13.6")
    with_word = environment.check_gpu(devices, {"cupy-cuda12x": "13.6"}, "MPI says no")
    assert with_word == Finding("GPU", "2 on this node, cupy-cuda12x 13.6; MPI says no")


# --- report --------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [(Status.FAIL,), (Status.OK, "do nothing")])
def test_problem_without_remedy_cannot_be_made(wrong: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="remedy"):
        Finding("x", "it is", *wrong)


def test_exit_code_is_78_only_for_blocking_problems() -> None:
    good, warning = Finding("a", "b"), Finding("a", "b", Status.WARN, "c")
    assert exit_code([good, warning]) == 0
    assert exit_code([good, Finding("a", "b", Status.FAIL, "c"), warning]) == 78
    assert summary([good, warning]) == "usable, 1 warning, 2 checks"


def test_remedy_stands_on_the_line_after_the_problem() -> None:
    first, second = Finding("cores", "none", Status.FAIL, "buy some").text().splitlines()
    assert first.split() == ["fail", "cores", "none"]
    assert second.strip() == "-> buy some"


def disk_findings(*speeds: Speed) -> list[Finding]:
    return list(examination.check_disk(speeds, Path("/scratch")))


def test_step_from_disk_is_as_slow_as_the_slowest_rank() -> None:
    speeds = Speed(4e9, 2e9, "a file"), Speed(1e9, 0.5e9, "a file")
    measured, step = disk_findings(*speeds)
    assert "5.00 GB/s read, 2.50 GB/s written by 2 rank(s)" in measured.value
    assert "slowest rank: 1.00, 0.50" in measured.value
    # 24 bytes in at 1 GB/s and 16 out at 0.5 GB/s, of half a billion parameters; 12 and 12
    assert "28.0 s of disk with everything there (40 bytes per parameter), 18.0 s" in step.value
    assert {measured.status, step.status} == {Status.OK}


def test_disk_that_fails_blocks_and_one_behind_the_cache_is_warned_of() -> None:
    (failed,) = disk_findings(Speed(error="rank 0: no room"), Speed(error=""))
    assert_problem(failed, Status.FAIL, "rank 0: no room", "--disk FOLDER")
    warned, _ = disk_findings(Speed(1e9, 1e9, "a file"), Speed(1e9, 1e9, "a", "no O_DIRECT"))
    assert_problem(warned, Status.WARN, "GB/s", "no O_DIRECT")
