"""Profiles of models on a device: times are taken when it has come to them."""

import pytest
import torch

from tests.devices.device_process import on_the_emulated_device


@on_the_emulated_device
def test_the_models_device_is_waited_for_and_not_the_current_one():
    import bagua

    waited = []
    there = torch.device("emulated", 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.emulated, "synchronize", lambda device=None: waited.append(device))
        model = torch.nn.Linear(4, 2).to(there)
        bagua.profiles.record(model, lambda model: model(torch.ones(3, 4, device=there)).sum(), repetitions=1)
    assert len(waited) > 6 and {*waited} == {there}
