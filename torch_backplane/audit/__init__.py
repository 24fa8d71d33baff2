"""What operators would do on devices that are not here: launches, memory and time by a model of their targets.

observer.h counts what the kernel interpreter runs; driver.py has a device for each target; model.py makes figures of
what was counted. cases.py is what is run, bounds.py what is held against it. worker.py runs it in a process of its own,
for run.py, and report.py writes the page.
"""
