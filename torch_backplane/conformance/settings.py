"""The settings of a conformance run. They are sent to the workers as JSON."""

from __future__ import annotations

from dataclasses import dataclass

OP_DB = "torch.testing._internal.common_methods_invocations:op_db"


@dataclass(frozen=True)
class Settings:
    """The settings of one run.

    Attributes:
        device: the device under test, as ``torch.device`` accepts it.
        dtypes: names of torch dtypes; an operator is checked in those that it supports on the CPU.
        match: regular expression searched for in the operator's full name (``linalg.norm``, ``div.floor_rounding``).
        grad: also compare gradients, for differentiable operators and dtypes.
        samples: maximum number of sample inputs per operator and direction; 0 means all.
        timeout: seconds that one operator in one dtype may take before its worker is killed.
        minutes: duration of the run, after which operators that were not checked are counted. 0 means no limit.
        database: the list of ``OpInfo``, as ``module:attribute``.
        forms: instead, check variants of the ATen calls that the operators make (forms.py).
        sizes: instead, call the operators with mismatched sizes (sizes.py).
        cuda_dtypes: check the dtypes that CUDA supports and the CPU does not, in place of ``dtypes``.
        driver: value of ``TORCH_BACKPLANE_DRIVERS`` in the workers; None leaves it unchanged.
        target: value of ``TORCH_BACKPLANE_TARGET`` in the workers; None leaves it unchanged.
        sanitize: run on the kernel sanitizer's device (``TORCH_BACKPLANE_SANITIZE_KERNELS``) and report accesses out of
            bounds and races of launches as findings. Excludes ``driver``.
    """

    device: str = "bp"
    dtypes: tuple[str, ...] = ("float32",)
    match: str = ""
    grad: bool = False
    samples: int = 0
    timeout: float = 120.0
    minutes: float = 0.0
    database: str = OP_DB
    driver: str | None = None
    target: str | None = None
    forms: bool = False
    sizes: bool = False
    cuda_dtypes: bool = False
    sanitize: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtypes", tuple(self.dtypes))  # JSON brings a list
        if not self.dtypes:
            raise ValueError("dtypes is empty: specify at least one torch dtype, such as float32")
        if self.samples < 0:
            raise ValueError(f"samples is {self.samples}: use a positive limit, or 0 for all")
        if self.timeout <= 0:
            raise ValueError(f"timeout is {self.timeout}: use a positive number of seconds")
        if self.minutes < 0:
            raise ValueError(f"minutes is {self.minutes}: use a positive number, or 0 for no limit")
        if self.sanitize and self.driver:
            raise ValueError(f"sanitize excludes driver {self.driver!r}: the kernel sanitizer brings its own device")

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that a worker needs to find the devices under test.

        NVIDIA's libraries must compute float32 in float32, as the CPU does.
        """
        wanted = {
            "NVIDIA_TF32_OVERRIDE": "0",
            "TORCH_BACKPLANE_DRIVERS": self.driver,
            "TORCH_BACKPLANE_TARGET": self.target,
        }
        if self.sanitize:
            wanted["TORCH_BACKPLANE_SANITIZE_KERNELS"] = "1"
        return {name: value for name, value in wanted.items() if value is not None}
