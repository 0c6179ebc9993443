import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest  # noqa: E402
import torch  # noqa: E402


@pytest.fixture(autouse=True)
def _one_thread():
    """Tiny models lose time in thread pools, and tests run side by side."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _always_draft(request, monkeypatch):
    """Tests of the engine need drafts whatever they cost here; those marked `goodput` get what users get."""
    if request.node.get_closest_marker("goodput") is None:
        monkeypatch.setattr("hf_specstate.calls.DEFAULTS", {"max_nodes": 8, "schedule": "constant"})
