"""Predicts launches, memory accesses and time of operators on modelled GPUs, without hardware.

observer.h counts the memory accesses of kernels in the interpreter. driver.py has a device for each target, and
model.py computes figures from the counts. cases.py lists the operators to run, and bounds.py the limits of their
figures. run.py starts worker.py in a process (processes.py), which runs the cases, and report.py writes the results.
"""
