"""MNIST (LeCun et al. 1998), from the Hub or from its original files, for the two rungs that train on it."""

import gzip
import logging
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def load_mnist(folder: Path | None) -> tuple[Tensor, Tensor]:
    """The training images, float32 [N, 1, 28, 28], normalised by MNIST's mean and deviation, and labels, int64 [N].

    Args:
        folder: where the original IDX files lie, packed with gzip or not: the 60,000 training images or, where they
            are not there, the 10,000 of the test set. None: `ylecun/mnist`, through the datasets library.

    Raises:
        ValueError: the images are not there or not MNIST; says what to do.
    """
    if folder is None:
        images, labels = _from_hub()
    else:
        name = "train" if any(folder.glob("train-images-idx3-ubyte*")) else "t10k"
        images = _read_idx(folder, f"{name}-images-idx3-ubyte", dimensions=3)
        labels = _read_idx(folder, f"{name}-labels-idx1-ubyte", dimensions=1)
    if images.shape[1:] != (28, 28) or len(images) != len(labels) or not len(labels):
        raise ValueError(f"{folder}: images {images.shape} and labels {labels.shape} do not belong together")
    pixels = torch.from_numpy(images).float().unsqueeze(1) / 255
    return (pixels - 0.1307) / 0.3081, torch.from_numpy(labels).long()


def _from_hub() -> tuple[np.ndarray, np.ndarray]:
    try:
        from datasets import load_dataset  # here, because a machine that has the files needs no library

        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it reports each of its attempts
        dataset = load_dataset("ylecun/mnist", split="train")
    except Exception as error:  # of the library, the Hub's client, its HTTP client or the network: all mean the same
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(
            "MNIST could not be loaded with the datasets library from the Hub (ylecun/mnist). Either connect this "
            "machine once, or put train-images-idx3-ubyte.gz and train-labels-idx1-ubyte.gz (or the t10k files) into "
            f"a folder and pass --data FOLDER. The reason was: {reason}"
        ) from None
    images = np.stack([np.asarray(image, dtype=np.uint8) for image in dataset["image"]])
    return images, np.array(dataset["label"], dtype=np.uint8)


def _read_idx(folder: Path, name: str, dimensions: int) -> np.ndarray:
    """The bytes of an IDX file: 0, 0, 8 (unsigned bytes), the number of dimensions, each as a big-endian int32."""
    path = next((path for path in (folder / name, folder / f"{name}.gz") if path.exists()), None)
    if path is None:
        raise ValueError(f"--data {folder}: neither {name} nor {name}.gz is there")
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    start = 4 + 4 * dimensions
    shape = np.frombuffer(content[4:start], dtype=">i4").tolist() if len(content) >= start else []
    if content[:4] != bytes([0, 0, 8, dimensions]) or len(content) - start != np.prod(shape, dtype=np.int64):
        raise ValueError(f"{path} is not an IDX file of unsigned bytes in {dimensions} dimensions, or was cut off")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape).copy()
