"""Copy the weights of another model into a new one, for `init_from`."""

import hashlib

import torch
from torch import Tensor

from config.errors import ConfigError
from distributed.world import is_main_process
from model.gpt import GPTModel
from run.load import Loaded


def copy_initial_weights(network: GPTModel, initial: Loaded) -> None:
    """Copy the weights of `initial` into a new network; raise ConfigError if that has no place for some of them.

    Parameters that `initial` lacks, such as those that a fork adds, keep their random initial values.
    """
    lacking, unexpected = network.load_state_dict(initial.model.state_dict(), strict=False)
    if unexpected:
        raise ConfigError(f"init_from: the model lacks {len(unexpected)} of its tensors, such as {unexpected[0]}")
    if lacking and is_main_process():
        print(f"init_from: {len(lacking)} tensors are not in it and are initialised at random, such as {lacking[0]}")


def hash_weights(weights: dict[str, Tensor]) -> str:
    """Return a hash of the weights and their names, in 32 hexadecimal digits, independent of the files' format."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(weights.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
