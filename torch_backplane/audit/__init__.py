"""What operators would do on devices that are not here: launches, memory and time by a model of their targets.

runtime.cpp runs kernels, compiled for the processor, and counts; driver.py has a device for each target; model.py makes
figures of what was counted. cases.py and pointwise.py are what is run, bounds.py what is held against it, and worker.py
runs it in a process of its own, for audit.py.
"""
