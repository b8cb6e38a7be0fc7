"""Environment variables of launchers, converted to the names that torch and Accelerate read."""

from collections.abc import MutableMapping

from config.errors import ConfigError

# Each variable's name in torch, and its names in Open MPI, in MPICH and Intel MPI, and in MVAPICH.
MPI_NAMES = {
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"),
    "RANK": ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK"),
    "LOCAL_WORLD_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK"),
}
INTEGERS = (*MPI_NAMES, "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "OMP", "PMI_", "MPI_", "MV2_", "MASTER_ADDR", *INTEGERS)


def normalize_environment(environment: MutableMapping[str, str]) -> None:
    """Give processes started by mpirun, notebook_launcher or by hand the variables that torchrun sets.

    Empty variables are removed, and so is the rank of a single process without a rendezvous. Raise ConfigError if a
    value is not a number, the rank is out of range, or a variable for the rendezvous is missing.
    """
    for name in [name for name, value in environment.items() if value == "" and name.startswith(PREFIXES)]:
        del environment[name]
    if "MIXED_PRECISION" in environment:  # set by notebook_launcher, not read by Accelerate
        environment.setdefault("ACCELERATE_MIXED_PRECISION", environment["MIXED_PRECISION"])
    size_variable = next((key for key in ("WORLD_SIZE", *MPI_NAMES["WORLD_SIZE"]) if key in environment), "WORLD_SIZE")
    _translate_mpi(environment)
    for name in INTEGERS:
        if not environment.get(name, "1").isdecimal():
            raise ConfigError(f"{name}: {environment[name]!r} in the environment is not a number")
    size = int(environment.get("WORLD_SIZE", 1))
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing and size == 1:
        for name in ("RANK", "LOCAL_RANK"):  # if LOCAL_RANK is set, Accelerate assumes several processes
            environment.pop(name, None)
    elif missing:
        raise ConfigError(
            f"{size_variable}: {size} processes, but {', '.join(missing)} is not set in the environment; MASTER_ADDR "
            f"and MASTER_PORT are the address of process 0. To train with one process, unset {size_variable}"
        )
    elif int(environment["RANK"]) >= size:
        raise ConfigError(f"RANK: {environment['RANK']} in the environment, but WORLD_SIZE is {size}; ranks start at 0")


def _translate_mpi(environment: MutableMapping[str, str]) -> None:
    # Remove the MPI variables even if they are not used: Accelerate would read those that a scheduler left behind.
    found = {name: environment.pop(key) for name, keys in MPI_NAMES.items() for key in keys if key in environment}
    if "WORLD_SIZE" in environment or found.get("WORLD_SIZE", "1") == "1":
        return
    if "RANK" in found:
        found = {"LOCAL_RANK": found["RANK"], "LOCAL_WORLD_SIZE": found["WORLD_SIZE"], "MASTER_PORT": "29500"} | found
        if found["LOCAL_WORLD_SIZE"] == found["WORLD_SIZE"]:
            found["MASTER_ADDR"] = "127.0.0.1"
    environment.update(found | dict(environment))
