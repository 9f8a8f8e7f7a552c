"""`bagua doctor` lists devices, what drives them, and how their tensors move."""

import re

from tests.devices.device_process import on_the_device


@on_the_device
def test_devices_are_listed():
    import tests.emulated_device as emulated
    from bagua.cli import doctor

    emulated.limit_memory(3 << 29)
    report = doctor.report_host()
    devices = re.findall(r"^device +emulated:(\d)  emulated device (\d), 1\.5 GiB, the host's$", report, re.MULTILINE)
    assert devices == [(str(index), str(index)) for index in range(emulated.num_devices)]
    assert re.search(r"^core +built for cpu( cuda)? emulated$", report, re.MULTILINE)
    assert re.search(r"^driver +emulated: no driver, and nothing to drive$", report, re.MULTILINE)
    assert re.search(r"^nccl +(none|\d+\.\d+\.\d+) \(of torch\)$", report, re.MULTILINE)
    assert re.search(r"^device tensors staged between ranks: through pinned host memory", report, re.MULTILINE)
