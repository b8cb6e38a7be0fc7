"""What launchers say in the environment, in the names of torch and Accelerate; before anything reads it."""

from collections.abc import Mapping, MutableMapping

from config.errors import ConfigError

# What Open MPI, then MPICH and Intel MPI, then MVAPICH call what torch and Accelerate know by these names.
MPI_NAMES = {
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"),
    "RANK": ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK"),
    "LOCAL_WORLD_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK"),
}
ALL_OF_MPI = tuple(name for names in MPI_NAMES.values() for name in names)
COUNTS = (*MPI_NAMES, *ALL_OF_MPI, "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
NEEDED_TO_MEET = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "TORCHELASTIC_", "MASTER_", "OMP_NUM_THREADS", *COUNTS)


def normalize_environment(environment: MutableMapping[str, str]) -> None:
    """Make processes that mpirun, notebook_launcher or a hand has started ones like all others.

    An empty variable is one that is not set, and one process needs no meeting place.

    Raises:
        ConfigError: a count is none, or several processes cannot find each other.
    """
    for name in [name for name, value in environment.items() if value == "" and name.startswith(PREFIXES)]:
        del environment[name]
    for name in COUNTS:
        if not (value := environment.get(name, "1")).isdecimal() or int(value) >= 2**16:
            raise ConfigError(f"{name}: {value!r} of the environment is no whole number below 65,536")
    if "MIXED_PRECISION" in environment:  # notebook_launcher's name for it, which nobody reads
        environment.setdefault("ACCELERATE_MIXED_PRECISION", environment["MIXED_PRECISION"])
    if "WORLD_SIZE" not in environment:
        _translate_mpi(environment)
    else:  # Accelerate would believe what an MPI has left there
        for name in ALL_OF_MPI:
            environment.pop(name, None)
    size, missing = environment.get("WORLD_SIZE", "1"), [name for name in NEEDED_TO_MEET if name not in environment]
    if size == "1" and missing:
        ranks = {name: environment[name] for name in ("RANK", "LOCAL_RANK") if environment.get(name, "0") != "0"}
        environment.pop("LOCAL_RANK", None)  # by which Accelerate takes it for one of several
        if "LOCAL_WORLD_SIZE" in environment:
            environment["LOCAL_WORLD_SIZE"] = "1"
    else:
        ranks = {"RANK": environment["RANK"]} if int(environment.get("RANK", 0)) >= int(size) else {}
    for name, rank in ranks.items():
        said = environment.get("WORLD_SIZE", "not set")
        raise ConfigError(f"{name}: {rank} of the environment, but WORLD_SIZE is {said}; ranks are counted from 0")
    if int(size) > 1 and missing:
        raise ConfigError(
            f"{size_variable(environment)}: {size} processes, but {', '.join(missing)} of the environment is not set; "
            "MASTER_ADDR and MASTER_PORT are where the others reach process 0. Of one process alone, unset "
            f"{size_variable(environment)}"
        )


def size_variable(environment: Mapping[str, str]) -> str:
    """The name of the variable that said how many processes there are."""
    return next((key for key in MPI_NAMES["WORLD_SIZE"] if key in environment), "WORLD_SIZE")


def _translate_mpi(environment: MutableMapping[str, str]) -> None:
    told = {name: environment[key] for name, keys in MPI_NAMES.items() for key in keys if key in environment}
    if int(told.get("WORLD_SIZE", 1)) == 1:
        return
    if "RANK" in told:
        told = {"LOCAL_RANK": told["RANK"], "LOCAL_WORLD_SIZE": told["WORLD_SIZE"], "MASTER_PORT": "29500", **told}
        if told["LOCAL_WORLD_SIZE"] == told["WORLD_SIZE"]:
            told["MASTER_ADDR"] = "127.0.0.1"
    environment |= told | dict(environment)
