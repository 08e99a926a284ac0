"""DeepSpeed's `deepspeed.ops.op_builder`: builders of operators, of which nothing is compiled here.

Scripts ask them whether an operator can be used, or build it before they train. torch has the
kernels of the optimizers, so `load` has nothing to do for these.
"""

from __future__ import annotations

from zero_contract.errors import ZeroError


class OpBuilder:
    """The builder of an operator."""

    NAME = ""
    offered = False
    """Whether what the operator does is offered here."""

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether the operator can be used."""
        del verbose
        return self.offered

    def load(self, verbose: bool = True) -> None:
        """Do nothing: torch has the kernels.

        Raises:
            ZeroError: The operator is not offered.
        """
        del verbose
        if not self.offered:
            raise ZeroError(
                f"{type(self).__name__}: nothing is compiled, and torch has no such kernel; leave "
                "it out"
            )


def _builder(name: str, operator: str, *, offered: bool) -> type[OpBuilder]:
    return type(name, (OpBuilder,), {"NAME": operator, "offered": offered, "__doc__": operator})


CPUAdagradBuilder = _builder("CPUAdagradBuilder", "cpu_adagrad", offered=True)
CPUAdamBuilder = _builder("CPUAdamBuilder", "cpu_adam", offered=True)
CPULionBuilder = _builder("CPULionBuilder", "cpu_lion", offered=True)
FusedAdamBuilder = _builder("FusedAdamBuilder", "fused_adam", offered=True)
FusedLambBuilder = _builder("FusedLambBuilder", "fused_lamb", offered=True)
FusedLionBuilder = _builder("FusedLionBuilder", "fused_lion", offered=True)
AsyncIOBuilder = _builder("AsyncIOBuilder", "async_io", offered=True)
CCLCommBuilder = _builder("CCLCommBuilder", "deepspeed_ccl_comm", offered=False)
FPQuantizerBuilder = _builder("FPQuantizerBuilder", "fp_quantizer", offered=False)
GDSBuilder = _builder("GDSBuilder", "gds", offered=False)
InferenceBuilder = _builder("InferenceBuilder", "transformer_inference", offered=False)
PinMemoryBuilder = _builder("PinMemoryBuilder", "pin_memory", offered=False)
QuantizerBuilder = _builder("QuantizerBuilder", "quantizer", offered=False)
ShareMemCommBuilder = _builder("ShareMemCommBuilder", "deepspeed_shm_comm", offered=False)
SpatialInferenceBuilder = _builder("SpatialInferenceBuilder", "spatial_inference", offered=False)
TransformerBuilder = _builder("TransformerBuilder", "transformer", offered=False)
UtilsBuilder = _builder("UtilsBuilder", "utils", offered=False)

BUILDERS = tuple(OpBuilder.__subclasses__())
"""All of them."""
