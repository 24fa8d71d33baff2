// Faults that tests inject.

#pragma once

// Counts a call, and returns the error with which it must end; 0 if it can go on.
int fault_of(const char* name);
