"""One opened device for all tests of this folder, or a reason in the summary why there is none."""

from collections.abc import Iterator

import pytest
import torch

from shared.device.cuda import CudaDevice
from shared.device.open import open_device
from shared.errors import ResourceMissing


@pytest.fixture(scope="session")
def device() -> Iterator[CudaDevice]:
    """Open ``cuda``; a machine with a GPU that lacks a library fails instead of skipping."""
    if torch.version.cuda is None:
        pytest.skip(f"torch {torch.__version__} is a build for CPUs")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    try:
        opened = open_device("cuda")
    except ResourceMissing as error:
        pytest.fail(error.message, pytrace=False)
    assert isinstance(opened, CudaDevice)
    yield opened
    opened.synchronise()
