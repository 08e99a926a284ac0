"""Cases of Lightning that ask for GPUs run on the CPU, each in one process.

Its strategy for DeepSpeed refuses a CPU. A case that counts devices still sees the numbers that it
has given to Lightning by a mock.
"""

import lightning.fabric.connector
import lightning.fabric.strategies.deepspeed
import lightning.fabric.utilities.testing
import lightning.pytorch.strategies.deepspeed
import lightning.pytorch.trainer.connectors.accelerator_connector
import lightning.pytorch.utilities.testing
from lightning.fabric.accelerators import Accelerator, cuda


def _needs_no_gpu(reasons):
    def found(*, min_cuda_gpus=0, bf16_cuda=False, standalone=False, **needs):
        return reasons(**needs)

    return found


def _of_gpus(validate):
    def validated(devices):
        if all(device.type != "cpu" for device in devices):
            validate(devices)

    return validated


def _takes_the_cpu(make):
    def made(self, *args, accelerator="auto", devices="auto", **named):
        if accelerator in ("gpu", "cuda") and not cuda.num_cuda_devices():
            accelerator, devices = "cpu", 1
        make(self, *args, accelerator=accelerator, devices=devices, **named)

    return made


for _package in (lightning.fabric, lightning.pytorch):
    _package.utilities.testing._runif_reasons = _needs_no_gpu(
        _package.utilities.testing._runif_reasons
    )
    _strategy = _package.strategies.deepspeed
    _strategy.CUDAAccelerator = Accelerator
    _strategy._validate_device_index_selection = _of_gpus(
        lightning.fabric.strategies.deepspeed._validate_device_index_selection
    )

for _connector in (
    lightning.fabric.connector._Connector,
    lightning.pytorch.trainer.connectors.accelerator_connector._AcceleratorConnector,
):
    _connector.__init__ = _takes_the_cpu(_connector.__init__)
