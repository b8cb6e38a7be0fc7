"""Environment variables of launchers, converted to the names that torch and Accelerate read."""

from collections.abc import Mapping, MutableMapping

from config.errors import ConfigError

# The names in torch, and the same in Open MPI, MPICH and Intel MPI, and MVAPICH.
MPI_NAMES = {
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"),
    "RANK": ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK"),
    "LOCAL_WORLD_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK"),
}
ALL_MPI_NAMES = tuple(name for names in MPI_NAMES.values() for name in names)
COUNTS = (*MPI_NAMES, *ALL_MPI_NAMES, "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
RENDEZVOUS_NAMES = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "TORCHELASTIC_", "MASTER_", "OMP_NUM_THREADS", *COUNTS)


def normalize_environment(environment: MutableMapping[str, str]) -> None:
    """Give processes started by mpirun, notebook_launcher or by hand the variables that torchrun sets.

    Empty variables are removed. A single process needs no rendezvous, so LOCAL_RANK alone is removed too.

    Raises:
        ConfigError: A count is not a number, a rank is out of range, or a variable for the rendezvous is missing.
    """
    for name in [name for name, value in environment.items() if value == "" and name.startswith(PREFIXES)]:
        del environment[name]
    _check_counts(environment)
    if "MIXED_PRECISION" in environment:  # set by notebook_launcher, not read by Accelerate
        environment.setdefault("ACCELERATE_MIXED_PRECISION", environment["MIXED_PRECISION"])
    if "WORLD_SIZE" not in environment:
        _translate_mpi(environment)
    else:  # Accelerate would read MPI variables that a scheduler left behind
        for name in ALL_MPI_NAMES:
            environment.pop(name, None)
    size = int(environment.get("WORLD_SIZE", 1))
    missing = [name for name in RENDEZVOUS_NAMES if name not in environment]
    if size == 1 and missing:
        for name in ("RANK", "LOCAL_RANK"):
            _check_rank(environment, name, size)
        environment.pop("LOCAL_RANK", None)  # Accelerate takes it for a sign of several processes
        if "LOCAL_WORLD_SIZE" in environment:
            environment["LOCAL_WORLD_SIZE"] = "1"
        return
    _check_rank(environment, "RANK", size)
    if missing:
        source = world_size_variable(environment)
        raise ConfigError(
            f"{source}: {size} processes, but {', '.join(missing)} is not set in the environment; MASTER_ADDR and "
            f"MASTER_PORT are the address of process 0. To train with one process, unset {source}"
        )


def world_size_variable(environment: Mapping[str, str]) -> str:
    """Return the name of the environment variable that the number of processes was read from."""
    return next((key for key in MPI_NAMES["WORLD_SIZE"] if key in environment), "WORLD_SIZE")


def _check_counts(environment: Mapping[str, str]) -> None:
    for name in COUNTS:
        if not (value := environment.get(name, "1")).isdecimal() or int(value) >= 2**16:
            raise ConfigError(f"{name}: {value!r} in the environment is not an integer from 0 to 65,535")


def _check_rank(environment: Mapping[str, str], name: str, size: int) -> None:
    if name in environment and int(environment[name]) >= size:
        world_size = environment.get("WORLD_SIZE", "not set")
        raise ConfigError(
            f"{name}: {environment[name]} in the environment, but WORLD_SIZE is {world_size}; ranks start at 0"
        )


def _translate_mpi(environment: MutableMapping[str, str]) -> None:
    ranks = {name: environment[key] for name, keys in MPI_NAMES.items() for key in keys if key in environment}
    if int(ranks.get("WORLD_SIZE", 1)) == 1:
        return
    if "RANK" in ranks:
        ranks = {"LOCAL_RANK": ranks["RANK"], "LOCAL_WORLD_SIZE": ranks["WORLD_SIZE"], "MASTER_PORT": "29500", **ranks}
        if ranks["LOCAL_WORLD_SIZE"] == ranks["WORLD_SIZE"]:
            ranks["MASTER_ADDR"] = "127.0.0.1"
    environment.update(ranks | dict(environment))
