"""For tests of programs and of drivers: `faults` makes calls of a device fail, `sanitizer` finds races of streams."""
