"""What one conformance run covers. Plain data: it travels to the workers as JSON."""

from __future__ import annotations

from dataclasses import dataclass

OP_DB = "torch.testing._internal.common_methods_invocations:op_db"


@dataclass(frozen=True)
class Settings:
    """The choices of one run.

    Attributes:
        device: the device under test, as ``torch.device`` accepts it.
        dtypes: names of torch dtypes; an operator is checked for those of them that it supports on the CPU.
        match: regular expression searched for in the operator's full name (``linalg.norm``, ``div.floor_rounding``).
        grad: also compare gradients, for differentiable operators and dtypes.
        samples: at most so many sample inputs per operator and direction; 0 means all.
        timeout: seconds that one operator (in one dtype) may take before its worker is killed.
        database: where the list of ``OpInfo`` is found, as ``module:attribute``.
        forms: instead, check the forms of the ATen calls that the operators make (forms.py).
        sizes: instead, call the operators with sizes that do not fit (sizes.py).
        cuda_dtypes: check the dtypes that CUDA serves and the CPU lacks, in place of ``dtypes``.
        driver: value of ``TORCH_BACKPLANE_DRIVERS`` in the workers; None leaves it as it is.
        target: likewise of ``TORCH_BACKPLANE_TARGET``.
        sanitize: the device is the kernel sanitizer's (``TORCH_BACKPLANE_SANITIZE_KERNELS``), and what it finds of
            bounds and races in launches is a finding, too. Excludes ``driver``.
    """

    device: str = "bp"
    dtypes: tuple[str, ...] = ("float32",)
    match: str = ""
    grad: bool = False
    samples: int = 0
    timeout: float = 120.0
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
            raise ValueError("dtypes is empty: name at least one torch dtype, such as float32")
        if self.samples < 0:
            raise ValueError(f"samples is {self.samples}: use a positive limit, or 0 for all")
        if self.timeout <= 0:
            raise ValueError(f"timeout is {self.timeout}: use a positive number of seconds")
        if self.sanitize and self.driver:
            raise ValueError(f"driver is {self.driver!r}, and the device that sanitizes is no driver's")

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs, beside what it has, to find the devices under test."""
        wanted = {"TORCH_BACKPLANE_DRIVERS": self.driver, "TORCH_BACKPLANE_TARGET": self.target}
        if self.sanitize:
            wanted["TORCH_BACKPLANE_SANITIZE_KERNELS"] = "1"
        return {name: value for name, value in wanted.items() if value is not None}
