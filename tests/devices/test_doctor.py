"""`bagua doctor` lists devices, their driver, and the way in which their tensors move."""

import contextlib
import io
import re

import torch

from tests.devices.device_process import on_the_emulated_device


@on_the_emulated_device
def test_devices_are_listed():
    import tests.emulated_device as emulated
    from bagua.cli import doctor

    emulated.limit_memory(3 << 29)
    report = doctor.report_host()
    devices = re.findall(r"^device +emulated:(\d)  emulated device (\d), 1\.5 GiB, the host's$", report, re.MULTILINE)
    assert devices == [(str(index), str(index)) for index in range(emulated.num_devices)]
    assert re.search(r"^core +built for cpu( cuda)? emulated$", report, re.MULTILINE)
    assert re.search(r"^driver +emulated: no driver, and nothing to drive$", report, re.MULTILINE)
    assert re.search(r"^nccl +(none: .*|\d+\.\d+\.\d+)$", report, re.MULTILINE)
    assert re.search(r"^device tensors over NCCL where every rank has .*, else staged through", report, re.MULTILINE)


def doctor_between_ranks(rank, world_size):
    from bagua.cli import doctor
    from tests import accelerator

    accelerator.use_device_of(0)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert doctor.main([]) == 0
    assert torch.accelerator.current_device_index() == 0  # an old torch could not have set it
    return printed.getvalue()


def test_how_their_tensors_move_is_tried_between_ranks(pair_on_devices):
    printed = "".join(pair_on_devices.run(doctor_between_ranks))
    (line,) = re.findall(r"^device tensors move by (.*)$", printed, re.MULTILINE)
    assert line.startswith(("NCCL ", "staged: rank 0 has no usable NCCL", "staged: ranks 0 and 1 share the device"))
