"""Tools for testing programs and drivers: `faults` injects device errors, `sanitizer` finds races between streams."""
