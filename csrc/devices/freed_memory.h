#pragma once

namespace backplane {

// PyTorch's kernels allocate megabytes for themselves, such as a convolution's operands in another order. Freed in another thread
// than the program's first, such as a queue's, glibc mostly gives them back to the system at once, which clears them page by page
// for the next call: that may take longer than the convolution. So, once this was called, it keeps up to 128 MiB of each thread's,
// unless the environment says what it does.
void keep_freed_memory();

} // namespace backplane
